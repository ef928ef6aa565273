//! The systems under `examples/`, each in its own stack: the commands of its README start it, and its session counts
//! what has happened.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use testbed::{TestPostgres, TestRedis, client::RawClient, docs::DocPage};
use tokio::process::{Child, Command};

use crate::{scenarios::root, support::BIN};

const BUILD_TIMEOUT: Duration = Duration::from_secs(300);

/// An example that runs in a copy of its folder. Dropping it kills its processes.
struct ExampleStack {
    page: DocPage,
    processes: Child,
    /// What its processes said.
    log: PathBuf,
    _folder: tempfile::TempDir,
}

/// How a test starts an example: what stands in its files, and what it is here.
struct ExampleLauncher {
    name: &'static str,
    replacements: Vec<(String, String)>,
    /// Lines of its start that another line takes the place of.
    other_lines: Vec<(&'static str, &'static str)>,
    /// Has the packages of the example's lockfile.
    packages: Option<PathBuf>,
}

fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port().to_string()
}

/// Where `scripts/tools` has put the packages of a lockfile.
fn installed(name: &str) -> PathBuf {
    let folder = root().join("target").join(name).join("node_modules");
    assert!(folder.exists(), "{} is missing: scripts/tools installs it", folder.display());
    folder
}

impl ExampleLauncher {
    fn new(name: &'static str) -> Self {
        let replacements = ["3000", "8080", "8081"].map(|port| (port.to_owned(), free_port())).to_vec();
        Self { name, replacements, other_lines: Vec::new(), packages: None }
    }

    fn replace(mut self, shown: &str, actual: impl Into<String>) -> Self {
        self.replacements.push((shown.to_owned(), actual.into()));
        self
    }

    fn redis(self, redis: &TestRedis) -> Self {
        self.replace("6379", redis.port().to_string())
    }

    /// A new database in place of the documented one.
    fn postgres(self, postgres: &TestPostgres, database: &str) -> Self {
        let url = postgres.url("migrator", &postgres.create_database());
        self.replace(&format!("postgres://{database}@127.0.0.1/{database}"), url)
    }

    /// In place of `npm ci`.
    fn packages(mut self, folder: PathBuf) -> Self {
        self.packages = Some(folder);
        self.line("npm ci", "")
    }

    fn line(mut self, documented: &'static str, actual: &'static str) -> Self {
        self.other_lines.push((documented, actual));
        self
    }

    fn to_actual(&self, text: &str) -> String {
        self.replacements.iter().fold(text.to_owned(), |text, (shown, actual)| text.replace(shown, actual))
    }

    fn addr(&self, documented_port: &str) -> SocketAddr {
        let (_, port) = self.replacements.iter().find(|(shown, _)| shown == documented_port).expect("it is replaced");
        format!("127.0.0.1:{port}").parse().expect("an address")
    }

    /// Starts the example by the commands of its README.
    async fn start(self) -> ExampleStack {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("examples").join(self.name);
        copy_folder(&root().join("examples").join(self.name), &folder);
        symlink(root().join("clients"), parent.path().join("clients")).expect("it is linked");
        if let Some(packages) = &self.packages {
            symlink(packages, folder.join("node_modules")).expect("it is linked");
        }
        let config = fs::read_to_string(folder.join("ibid.toml")).expect("an example has a configuration");
        fs::write(folder.join("ibid.toml"), self.to_actual(&config)).expect("it is written");
        let readme = folder.join("README.md");
        let text = fs::read_to_string(&readme).expect("an example has a README");
        let start = text.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block `sh`");
        let start = self.other_lines.iter().fold(start.to_owned(), |start, (documented, actual)| {
            assert!(start.lines().any(|line| line == *documented), "{documented} is not in {start}");
            start.replace(&format!("{documented}\n"), &format!("{actual}\n"))
        });
        let log = parent.path().join("log");
        let processes = self.run(&folder, &start, &log);
        self.wait_until_ready(&folder, config.contains("[api]"), &log).await;
        let page = DocPage::read(&readme);
        let page = self.replacements.iter().fold(page, |page, (shown, actual)| page.replace(shown, actual));
        ExampleStack { page, processes, log, _folder: parent }
    }

    fn run(&self, folder: &Path, start: &str, log: &Path) -> Child {
        let log = fs::File::create(log).expect("it is created");
        let path = std::env::var("PATH").unwrap_or_default();
        let ibid = Path::new(BIN).parent().expect("a binary has a folder");
        let script = format!("set -e\n{}\nwait", self.to_actual(start));
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(folder).env("PATH", format!("{}:{path}", ibid.display()));
        command.env("COMPOSER_ALLOW_SUPERUSER", "1").env("COMPOSER_HOME", folder.join(".composer"));
        command.env("COMPOSER_DISABLE_NETWORK", "1").env("NEXT_TELEMETRY_DISABLED", "1");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("it is open")).stderr(log);
        command.process_group(0).kill_on_drop(true).spawn().expect("bash is installed")
    }

    async fn wait_until_ready(&self, folder: &Path, has_socket: bool, log: &Path) {
        let end = tokio::time::Instant::now() + BUILD_TIMEOUT;
        let is_listening = async |port| RawClient::try_connect(self.addr(port)).await.is_ok();
        loop {
            let has_api = !has_socket || folder.join("ibid.sock").exists();
            if has_api && is_listening("3000").await && is_listening("8080").await {
                return;
            }
            let is_late = tokio::time::Instant::now() > end;
            assert!(!is_late, "{} does not listen:\n{}", self.name, fs::read_to_string(log).unwrap_or_default());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl ExampleStack {
    /// Runs the session of the README.
    async fn check(self) {
        if let Err(report) = self.page.check().await {
            panic!("{report}\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a parent")).expect("it is created");
    let copied = std::process::Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp runs");
    assert!(copied.success(), "{}", from.display());
}

impl Drop for ExampleStack {
    fn drop(&mut self) {
        if let Some(group) = self.processes.id() {
            let group = format!("-{group}");
            let _ = std::process::Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        }
    }
}

#[tokio::test]
async fn leads_in_php() {
    let redis = TestRedis::start();
    ExampleLauncher::new("leads-php").redis(&redis).start().await.check().await;
}

#[tokio::test]
async fn appsportal_behind_the_gateway() {
    let redis = TestRedis::start();
    ExampleLauncher::new("appsportal").redis(&redis).start().await.check().await;
}

#[tokio::test]
async fn bookings_in_nestjs_on_redis_with_a_fallback_to_postgresql() {
    let redis = TestRedis::start();
    let launcher = ExampleLauncher::new("bookings-nestjs").redis(&redis).packages(installed("bookings-nestjs"));
    launcher.postgres(TestPostgres::shared(), "bookings").start().await.check().await;
}

#[tokio::test]
async fn membership_route_handlers_on_postgresql() {
    // The handlers need `pg` and the SDK, and nothing of Next.js.
    let launcher = ExampleLauncher::new("membership-nextjs").packages(installed("bookings-nestjs"));
    let launcher = launcher.line("npm run build", "").line("PORT=3000 npm start &", "PORT=3000 npm run plain &");
    launcher.postgres(TestPostgres::shared(), "membership").start().await.check().await;
}

/// Installs Next.js, and builds and serves the example with it: a minute or more.
#[tokio::test]
#[ignore = "installs Next.js: scripts/test --nextjs"]
async fn membership_in_nextjs() {
    let launcher = ExampleLauncher::new("membership-nextjs");
    launcher.postgres(TestPostgres::shared(), "membership").start().await.check().await;
}
