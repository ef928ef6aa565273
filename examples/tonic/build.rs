//! Code and descriptors from `proto/shop.proto`, without protoc.

use std::{error::Error, fs, path::PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto/shop.proto");
    let descriptors = protox::compile(["shop.proto"], ["proto"])?;
    #[expect(clippy::disallowed_methods, reason = "by which cargo says where to write")]
    let out = std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    fs::write(PathBuf::from(out).join("shop.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
