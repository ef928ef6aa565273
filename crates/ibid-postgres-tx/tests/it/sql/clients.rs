//! The examples of the documentation, run as they stand there with the drivers that they are written for.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use ibid::{
    Scope,
    record::{Record, RecordBody},
    store::{ClaimOutcome, Store as _},
};
use tokio::{process::Command, time::timeout};

use crate::support::TxDatabase;

const DOCS: &str = include_str!("../../../../../docs/same-transaction.md");

/// Pays k-1 twice, once with another request, and many times at once.
const PYTHON: &str = r#"
import concurrent.futures, json, os, sys
import psycopg

def once(key, request):
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        status, headers, body = pay(db, key, request)
        return [status, headers, bytes(body).decode()]

def many(nth):
    for _ in range(200):
        answer = once("k-many", b"12.50")
        if answer[0] != 409:
            return answer[0]

said = [once("k-1", b"12.50"), once("k-1", b"12.50"), once("k-1", b"99.00")]
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    said.append(list(pool.map(many, range(8))))
print(json.dumps(said))
"#;

const NODE: &str = r#"
import pg from 'pg';
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 8 });
const once = async (key, request) => {
  const { status, headers, body } = await pay(pool, key, Buffer.from(request));
  return [status, headers, body.toString()];
};
const many = async () => {
  for (let nth = 0; nth < 200; nth++) {
    const [status] = await once('k-many', '12.50');
    if (status !== 409) return status;
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
};
const said = [await once('k-1', '12.50'), await once('k-1', '12.50'), await once('k-1', '99.00')];
said.push(await Promise.all(Array.from({ length: 8 }, many)));
console.log(JSON.stringify(said));
await pool.end();
"#;

/// The only example in that language.
fn example(language: &str) -> &'static str {
    let fence = format!("```{language}\n");
    let mut found = DOCS.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap());
    let example = found.next().unwrap_or_else(|| panic!("docs/same-transaction.md has no example in {language}"));
    assert!(found.next().is_none(), "docs/same-transaction.md has several examples in {language}");
    example
}

fn installed(path: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/sql-clients").join(path);
    assert!(path.exists(), "{} is missing: run scripts/tools", path.display());
    path
}

async fn run_example(scene: &TxDatabase, mut client: Command) -> serde_json::Value {
    scene.sql("CREATE TABLE payments (request bytea); GRANT ALL ON payments TO gateway");
    client.env("DATABASE_URL", scene.url()).stdin(Stdio::null()).kill_on_drop(true);
    let ran = timeout(Duration::from_secs(120), client.output()).await.expect("it ends").expect("it starts");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}\n{err}"))
}

async fn assert_example_result(scene: &TxDatabase, said: serde_json::Value) {
    let paid = serde_json::json!([201, {"content-type": "application/json"}, "{\"paid\":true}"]);
    let reused = serde_json::json!([422, {}, ""]);
    let many = serde_json::json!([201, 201, 201, 201, 201, 201, 201, 201]);
    assert_eq!(said, serde_json::json!([paid, paid, reused, many]));
    assert_eq!(scene.sql("SELECT count(*) FROM payments"), "2");
    // And the store replays it.
    let store = scene.store().await;
    let address = Scope::from_parts(&["acme", "payments"]).address("k-1", None, None);
    let Some(ClaimOutcome::Completed(done)) = store.get(&address).await.unwrap() else { panic!("it is done") };
    let record = Record::decode(done.record).unwrap();
    assert_eq!((record.status.as_u16(), record.body), (201, RecordBody::Whole("{\"paid\":true}".into())));
}

#[tokio::test]
async fn the_example_for_python_pays_once() {
    let scene = TxDatabase::new();
    let mut python = Command::new(installed("python/bin/python"));
    python.arg("-c").arg(format!("{}\n{PYTHON}", example("python")));
    assert_example_result(&scene, run_example(&scene, python).await).await;
}

#[tokio::test]
async fn the_example_for_node_pays_once() {
    let scene = TxDatabase::new();
    let modules = installed("node/node_modules");
    // Modules are looked for beside the script.
    let folder = tempfile::tempdir_in(modules.parent().unwrap()).unwrap();
    let script = folder.path().join("pay.mjs");
    std::fs::write(&script, format!("{}\n{NODE}", example("js"))).unwrap();
    let mut node = Command::new("node");
    node.arg(script);
    assert_example_result(&scene, run_example(&scene, node).await).await;
}
