//! The configuration in force, and its replacement without dropping a request.
//!
//! A changed file is read, checked and swapped in; one reload runs at a time. A file that is invalid, or that would make
//! remembered answers unreachable, is rejected and logged.

use std::{path::Path, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use ibid::quota::Quota;
use parking_lot::Mutex;

use crate::{
    config::{ConfigError, Env, GatewaySettings, SealSettings, ServeArgs, forgotten_answers},
    jwt::JwtVerifier,
    snapshot::ConfigSnapshot,
};

/// Interval between two checks of the file. Its content is compared, so every way of replacing it is noticed.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

pub struct LiveConfig {
    current: ArcSwap<ConfigSnapshot>,
    /// The settings at start-up. Settings that are only read at start-up keep these values.
    startup_settings: GatewaySettings,
    /// Held from reading the file to swapping it in, so that a reload cannot replace a newer file with an older one.
    reload_lock: Mutex<()>,
    args: ServeArgs,
    /// Keeps its counts when a reload changes the limits.
    pub quota: Arc<Quota>,
}

#[derive(Debug)]
pub enum ReloadOutcome {
    /// The file is equivalent to the configuration in force.
    Unchanged,
    /// The file is in force. Lists the settings that take effect only after a restart.
    Applied(Vec<&'static str>),
    /// The file is invalid; the old configuration stays in force.
    Invalid(String),
    /// The file would make remembered answers unreachable; the old configuration stays in force.
    WouldForget(Vec<String>),
}

impl LiveConfig {
    /// Puts a first snapshot in force.
    pub fn new(snapshot: ConfigSnapshot, args: ServeArgs) -> Arc<Self> {
        snapshot.jwt_verifier.iter().for_each(JwtVerifier::refresh_in_background);
        let limits = snapshot.settings.quota;
        let quota = Arc::new(Quota::new(limits.new_keys, limits.rate));
        quota.set_bytes(limits.new_bytes);
        let (startup_settings, reload_lock) = (snapshot.settings.clone(), Mutex::default());
        Arc::new(Self { current: ArcSwap::from_pointee(snapshot), startup_settings, reload_lock, args, quota })
    }

    pub fn now(&self) -> arc_swap::Guard<Arc<ConfigSnapshot>> {
        self.current.load()
    }

    /// Reads the file again. Concurrent reloads wait for each other.
    pub fn reload(&self, env: &Env<'_>) -> ReloadOutcome {
        let _alone = self.reload_lock.lock();
        self.reload_file(env, self.now().settings.reflected_descriptors.clone())
    }

    /// Like [`reload`](Self::reload), with the descriptor set that the upstreams of `asked` returned. Does nothing if
    /// `asked` is no longer in force, because the upstreams may differ.
    pub fn reload_with_reflection(
        &self, env: &Env<'_>, asked: &Arc<ConfigSnapshot>, reflected: Bytes,
    ) -> ReloadOutcome {
        let _alone = self.reload_lock.lock();
        if !Arc::ptr_eq(&self.now(), asked) {
            return ReloadOutcome::Unchanged;
        }
        self.reload_file(env, Some(reflected))
    }

    fn reload_file(&self, env: &Env<'_>, reflected: Option<Bytes>) -> ReloadOutcome {
        let mut settings = match GatewaySettings::load_with_reflection(&self.args, env, reflected) {
            Ok(settings) if settings.uses_reflection() && settings.reflected_descriptors.is_none() => {
                return ReloadOutcome::Invalid(
                    "descriptors: \"reflection\" is asked for at the start only; restart".into(),
                );
            }
            Ok(settings) => settings,
            Err(why) => return ReloadOutcome::Invalid(ConfigError::to_string(&why)),
        };
        let before = self.current.load();
        if settings == before.settings {
            return ReloadOutcome::Unchanged;
        }
        // The process still uses the store that it opened at start-up, whatever later files say.
        let mut in_force = before.settings.clone();
        in_force.store = self.startup_settings.store.clone();
        let forgotten = forgotten_answers(&in_force, &settings);
        if !forgotten.is_empty() && !settings.accept_forgetting {
            return ReloadOutcome::WouldForget(forgotten);
        }
        let fixed = settings.settings_needing_restart(&self.startup_settings);
        if let (Some(seal), Some(before)) = (&mut settings.seal, &before.settings.seal) {
            seal.reuse_sealing(before);
        }
        match ConfigSnapshot::new(settings, Some(&before)) {
            Ok(snapshot) => {
                // This must happen before the first request under the new settings.
                snapshot.settings.seal.iter().for_each(SealSettings::activate_keys);
                let known = before.jwt_verifier.as_ref();
                let new = snapshot.jwt_verifier.iter().filter(|jwt| known.is_none_or(|known| !Arc::ptr_eq(known, jwt)));
                new.for_each(JwtVerifier::refresh_in_background);
                let limits = snapshot.settings.quota;
                if limits != before.settings.quota {
                    self.quota.set(limits.new_keys, limits.rate);
                    self.quota.set_bytes(limits.new_bytes);
                }
                self.current.store(Arc::new(snapshot));
                ReloadOutcome::Applied(fixed)
            }
            Err(why) => ReloadOutcome::Invalid(why),
        }
    }

    /// Checks the file, and the files that its values come from, every second and whenever `nudged` receives.
    pub async fn watch(self: Arc<Self>, mut nudged: tokio::sync::mpsc::Receiver<()>) {
        let Some(path) = self.now().settings.file.clone() else { return };
        // `None` at first, because the file may have changed since it was loaded.
        let mut last = None;
        loop {
            let told_to = tokio::select! {
                () = tokio::time::sleep(FILE_POLL_INTERVAL) => false,
                Some(()) = nudged.recv() => true,
            };
            let content = Some(read_contents(&path, &self.now().settings.value_files.clone()).await);
            if content == last && !told_to {
                continue;
            }
            last = content;
            self.log_outcome(self.reload(&Env::process()));
        }
    }

    pub(crate) fn log_outcome(&self, reload: ReloadOutcome) {
        let file = self.now().settings.file.clone().unwrap_or_default();
        let shown = file.display();
        match reload {
            ReloadOutcome::Unchanged => {}
            ReloadOutcome::Applied(fixed) if fixed.is_empty() => {
                tracing::info!(file = %shown, "configuration taken up")
            }
            ReloadOutcome::Applied(fixed) => {
                tracing::warn!(file = %shown, needs_restart = fixed.join(", "), "configuration taken up in part");
            }
            ReloadOutcome::Invalid(why) => {
                why.lines().for_each(|line| tracing::error!("{line}; the configuration in force stays"));
            }
            ReloadOutcome::WouldForget(what) => tracing::error!(
                file = %shown,
                "the changed configuration would forget what is remembered, so the one in force stays; \
                 set accept_forgetting = true to take it all the same: {}",
                what.join("; ")
            ),
        }
    }
}

async fn read_contents(file: &Path, files: &[std::path::PathBuf]) -> Vec<Option<Vec<u8>>> {
    let mut found = Vec::with_capacity(1 + files.len());
    for path in files.iter().map(std::path::PathBuf::as_path).chain([file]) {
        found.push(tokio::fs::read(path).await.ok());
    }
    found
}
