//! `ibid report`: what enforcement makes, or would make, of each route's requests, and who sends no key. The question
//! before a route goes from `mode = "shadow"` to `enforce`.

use std::io;

use clap::Args;

use super::{
    keys::{columns, plain},
    outside::{self, Failed},
    remote::{AdminChoice, Api},
};
use crate::{
    admin::stats::{ShadowReport, ShadowRoute},
    config::Env,
};

/// `ibid report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    #[command(flatten)]
    admin: AdminChoice,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Asks a gateway, and prints what it says.
///
/// # Errors
/// If it cannot be asked.
pub fn run(args: &ReportArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), Failed> {
    let Some(api) = Api::of(&args.admin, env)? else {
        let what = "which gateway? name its admin address, such as --admin http://127.0.0.1:8081";
        return Err(Failed::Usage(what.into()));
    };
    let report: ShadowReport = outside::block_on(api.get("/api/shadow"))?;
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report).expect("a report has a form"))?;
    } else {
        print(&report, out)?;
    }
    Ok(())
}

fn print(report: &ShadowReport, out: &mut dyn io::Write) -> io::Result<()> {
    let names = ["ROUTE", "MODE", "REQUESTS", "RUN", "REPLAY", "REFUSE", "NO KEY"].map(String::from);
    let row = |route: &ShadowRoute| {
        [
            plain(&route.route),
            plain(&route.mode),
            route.requests.to_string(),
            route.run.to_string(),
            route.replay.to_string(),
            route.refuse.values().sum::<u64>().to_string(),
            route.no_key.to_string(),
        ]
    };
    let rows: Vec<[String; 7]> = [names].into_iter().chain(report.routes.iter().map(row)).collect();
    writeln!(out, "since {}\n", plain(&report.since))?;
    columns(&rows, out)?;
    for route in report.routes.iter().filter(|route| !route.refuse.is_empty() || route.no_key > 0) {
        writeln!(out, "\n{}", plain(&route.route))?;
        let would = if route.mode == "shadow" { "would be refused" } else { "refused" };
        for (reason, count) in &route.refuse {
            writeln!(out, "  {count} {would}: {}", plain(reason))?;
        }
        for agent in &route.no_key_by {
            let name = agent.user_agent.as_deref().map_or("no user agent".into(), plain);
            writeln!(out, "  {} without a key: {name}", agent.requests)?;
        }
        if route.no_key_by_others > 0 {
            writeln!(out, "  {} without a key: others", route.no_key_by_others)?;
        }
    }
    Ok(())
}
