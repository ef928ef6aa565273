//! `ibid report`: how enforcement handles, or would handle, each route's requests, and which callers send no key. It
//! helps to decide whether to change a route from `mode = "shadow"` to `enforce`.

use std::io;

use clap::Args;
use ibid_tools::CommandError;

use super::{
    admin_client::{AdminArgs, AdminClient},
    print::{escape_control, print_columns, print_json},
    store,
};
use crate::{
    admin::stats::{ShadowReport, ShadowRoute},
    config::Env,
};

#[derive(Debug, Args)]
pub struct ReportArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ReportArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let Some(api) = AdminClient::from_args(&args.admin, env)? else {
        let what = "which gateway? name its admin address, such as --admin http://127.0.0.1:8081";
        return Err(CommandError::Usage(what.into()));
    };
    let report: ShadowReport = store::block_on(api.get("/api/shadow"))?;
    Ok(if args.json { print_json(&report, out) } else { print(&report, out) }?)
}

fn print(report: &ShadowReport, out: &mut dyn io::Write) -> io::Result<()> {
    let names = ["ROUTE", "MODE", "REQUESTS", "RUN", "REPLAY", "REFUSE", "NO KEY"].map(String::from);
    let row = |route: &ShadowRoute| {
        [
            escape_control(&route.route),
            escape_control(&route.mode),
            route.requests.to_string(),
            route.run.to_string(),
            route.replay.to_string(),
            route.refuse.values().sum::<u64>().to_string(),
            route.no_key.to_string(),
        ]
    };
    let rows: Vec<[String; 7]> = [names].into_iter().chain(report.routes.iter().map(row)).collect();
    writeln!(out, "since {}\n", escape_control(&report.since))?;
    print_columns(&rows, out)?;
    for route in report.routes.iter().filter(|route| !route.refuse.is_empty() || route.no_key > 0) {
        writeln!(out, "\n{}", escape_control(&route.route))?;
        let would = if route.mode == "shadow" { "would be refused" } else { "refused" };
        for (reason, count) in &route.refuse {
            writeln!(out, "  {count} {would}: {}", escape_control(reason))?;
        }
        for agent in &route.no_key_by {
            let name = agent.user_agent.as_deref().map_or("no user agent".into(), escape_control);
            writeln!(out, "  {} without a key: {name}", agent.requests)?;
        }
        if route.no_key_by_others > 0 {
            writeln!(out, "  {} without a key: others", route.no_key_by_others)?;
        }
    }
    Ok(())
}
