//! Certificates that a store's URL names change under a gateway that runs: whoever replaced them learns what became of it.

use testbed::{
    RedisOptions, TestRedis,
    certificates::{CertificateAuthority, replace},
};

use super::common::pay;
use crate::support::{TestGateway, assert_ran};

#[tokio::test]
async fn what_became_of_changed_files_is_logged_and_the_gateway_goes_on() {
    let server = TestRedis::start_with(RedisOptions { tls: true, ..RedisOptions::default() });
    let authority = CertificateAuthority::new();
    let stranger = authority.vouch("stranger");
    let folder = tempfile::tempdir().unwrap();
    let [ca, cert, key] = ["ca.pem", "cert.pem", "key.pem"].map(|name| folder.path().join(name));
    for path in [&ca, &cert, &key] {
        replace(&server.path(path.file_name().unwrap().to_str().unwrap()), path);
    }
    let (ca, of, secret) = (ca.display(), cert.display(), key.display());
    let url = format!("rediss://127.0.0.1:{}/0?ca={ca}&cert={of}&key={secret}", server.port());
    let TestGateway { upstream: _upstream, gateway } =
        TestGateway::start(&format!("[store]\nurl = {url:?}\nlocal_cache = \"0\"\n")).await;
    assert_ran(&pay(&gateway, "k-1").send().await);
    // Nobody connects meanwhile: it is said all the same.
    replace(&stranger.cert, &cert);
    let line = gateway.wait_for_log("changed certificates cannot be used; new connections use those from before").await;
    assert!(line.contains(&format!("{of} cannot be used")) && line.contains("store=\"redis\""), "{line}");
    server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    assert_ran(&super::common::send_until_protected(&pay(&gateway, "k-2")).await);
    replace(&server.path("cert.pem"), &cert);
    gateway.wait_for_log("changed certificates are taken up: new connections use them").await;
    assert_ran(&pay(&gateway, "k-3").send().await);
    let said = gateway.logs().iter().filter(|line| line.contains("changed certificates")).count();
    assert_eq!(said, 2, "each is said once: {:#?}", gateway.logs());
}
