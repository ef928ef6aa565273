//! `ibid doctor`: checks what a start depends on, without starting. One line per check.

use std::{io, sync::Arc};

use ibid::observe::NoopObserver;
use ibid_tools::CommandError;

use super::{print::print_columns, store};
use crate::{
    config::{ConfigError, Env, GatewaySettings, ServeArgs},
    snapshot::ConfigSnapshot,
    startup_checks::{self, CheckResult, StartupVerdict},
};

/// Returns whether no check failed. Warnings do not count.
pub fn run(args: &ServeArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<bool, CommandError> {
    let settings = GatewaySettings::load(args, env)?;
    // Loads certificates, keys and upstreams as a start does.
    let file = settings.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
    ConfigSnapshot::new(settings.clone(), None).map_err(|why| ConfigError::new(file.clone(), "", why))?;
    let routes = settings.routes.iter().filter(|route| !route.is_default_policy).count();
    let source = if file.is_empty() { "no file, only flags and variables".into() } else { file };
    let mut results = vec![CheckResult::passed("configuration", format!("{source}; routes: {routes}"))];
    results.extend(startup_checks::check_settings(&settings));
    startup_checks::raise_file_limit();
    let (stored, apps) = store::block_on(async {
        Ok((open_and_check_store(&settings).await, startup_checks::check_upstreams(&settings).await))
    })?;
    results.extend(stored);
    results.extend(startup_checks::check_ports(&settings));
    results.extend(apps);
    results.extend(startup_checks::check_machine(&settings));
    let row = |result: &CheckResult| {
        let verdict = match result.verdict {
            StartupVerdict::Passed => "ok",
            StartupVerdict::Warning => "warning",
            StartupVerdict::Failed => "FAILED",
        };
        [verdict.to_owned(), result.subject.to_owned(), super::print::escape_control(&result.message)]
    };
    print_columns(&results.iter().map(row).collect::<Vec<_>>(), out)?;
    Ok(results.iter().all(|result| result.verdict != StartupVerdict::Failed))
}

/// Creates nothing: an embedded store that does not exist yet is not opened.
async fn open_and_check_store(settings: &GatewaySettings) -> Vec<CheckResult> {
    if let Some(folder) = startup_checks::embedded_folder(settings).filter(|folder| !folder.exists()) {
        return vec![CheckResult::passed("store", format!("{} is new; the start creates it", folder.display()))];
    }
    let url = &settings.store.url;
    let opened = settings.store.store_config().with_sealer(settings.sealing()).open(Arc::new(NoopObserver)).await;
    match opened {
        // A doctor beside a running gateway is no mistake.
        Err(why) if why.to_string().contains("in use by process") => {
            vec![CheckResult::warning(
                "store",
                format!("{url} is not checked: {why}; stop that gateway, or ask its /readyz"),
            )]
        }
        Err(why) => vec![CheckResult::failed("store", format!("{url} cannot be opened: {why}"))],
        Ok(opened) => {
            let promise = opened.store.guarantees();
            let durable = if promise.durable { "survives a crash" } else { "is lost with its process" };
            let shared = if promise.shared { "gateways may share it" } else { "for one gateway" };
            let promised = CheckResult::passed("promise", format!("the {} store {durable}; {shared}", promise.store));
            let mut results = startup_checks::check_store(settings, opened.store.as_ref()).await;
            results.insert(0, promised);
            results
        }
    }
}
