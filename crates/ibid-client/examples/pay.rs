//! Pays once, however often it is run, killed and started again:
//!
//!     cargo run -p ibid-client --example pay -- http://127.0.0.1:8080/pay ./keys order-17
//!
//! The key of `order-17` is kept in `./keys`, for as long as the server remembers it.

use std::{error::Error, process::ExitCode};

use ibid_client::{SendOptions, send};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [url, folder, operation] = &args[..] else {
        return Err("usage: pay URL FOLDER OPERATION".into());
    };
    let client = reqwest::Client::new();
    let request = client.post(url).header("content-type", "application/json").body(r#"{"amount":1}"#).build()?;
    let options = SendOptions::in_folder(folder).operation(operation);
    match send(&client, request, &options).await {
        Ok(answer) => {
            let (replayed, status) = (answer.replayed, answer.response.status().as_u16());
            println!("{status} replayed={replayed} {}", answer.response.text().await?);
            Ok(ExitCode::SUCCESS)
        }
        Err(stopped) => {
            eprintln!("{stopped}");
            // 75 is for what may work later (sysexits: EX_TEMPFAIL).
            Ok(if stopped.is_retryable() { ExitCode::from(75) } else { ExitCode::FAILURE })
        }
    }
}
