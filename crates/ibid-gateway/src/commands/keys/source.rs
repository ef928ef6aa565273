//! Where the entries are: in a store, or behind the admin API of a gateway that runs. Both say the same.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    mask,
    store::{Address, Store},
};
use serde_json::{Value, json};

use super::{
    super::{
        Failed, outside,
        remote::{Api, escaped},
    },
    PlaceArgs,
};
use crate::{
    config::{self, ConfigError, Env, Seal, StoreChoice},
    records::{
        Change, Changed, NotFound, Outcome, Page, Query, View, Wanted, What, state_name,
        view::{hex, millis},
    },
};

/// What `ibid keys` is to work on. What is sealed can be looked at, released and forgotten without keys.
pub(super) enum Place {
    Store(Box<config::Store>, Result<Option<Seal>, ConfigError>),
    Admin(Api),
}

/// What it works on.
pub(super) enum Source {
    /// And why something may be shown as it is sealed.
    Store(Arc<dyn Store>, String),
    Admin(Api),
}

impl Place {
    /// Reads the flags; nothing is opened yet.
    pub(super) fn of(args: &PlaceArgs, env: &Env<'_>) -> Result<Self, Failed> {
        let StoreChoice { store, config } = &args.store;
        if args.admin.admin.is_some() && (store.is_some() || config.is_some()) {
            let what = "--admin cannot be used with --store or --config: a gateway knows its own store";
            return Err(Failed::Usage(what.into()));
        }
        match Api::of(&args.admin, env)? {
            Some(api) => Ok(Self::Admin(api)),
            None => Ok(Self::Store(Box::new(config::Store::load(&args.store, env)?), Seal::load(&args.store, env))),
        }
    }

    pub(super) async fn open(self) -> Result<Source, Failed> {
        match self {
            Self::Store(settings, seal) => {
                let why = match &seal {
                    Err(why) => format!("the keys cannot be had: {why}"),
                    Ok(None) => "name the gateway's --config, with its [seal], to see what is in them".into(),
                    Ok(Some(_)) => "their keys are not in [seal], or they were altered".into(),
                };
                let sealing = seal.ok().flatten().and_then(|seal| seal.sealing());
                Ok(Source::Store(outside::open_sealed(&settings, sealing).await?.store, why))
            }
            Self::Admin(api) => Ok(Source::Admin(api)),
        }
    }
}

impl Source {
    /// Says that something is shown as it is sealed, and why.
    pub(super) fn say_sealed(&self, views: &[View], aside: &mut dyn io::Write) -> io::Result<()> {
        let sealed = views.iter().filter(|view| view.sealed_with.is_some()).count();
        let Self::Store(_, why) = self else { return Ok(()) };
        if sealed == 0 {
            return Ok(());
        }
        let entries = if sealed == 1 { "1 entry is" } else { &format!("{sealed} entries are") };
        writeln!(aside, "ibid: {entries} shown sealed, with hashes for key, tenant, user and endpoint: {why}")
    }

    /// Those that match, behind `from`.
    pub(super) async fn list(&self, query: Query, from: Option<Address>, limit: usize) -> Result<Page, Failed> {
        match self {
            Self::Store(store, _) => Ok(Wanted::of(query).list(&**store, from, limit).await?.into()),
            Self::Admin(api) => api.get(&listing(&query, from, limit)).await,
        }
    }

    /// The only one that matches.
    pub(super) async fn find_one(&self, query: Query) -> Result<View, Failed> {
        match self {
            Self::Store(store, _) => Ok(View::from(&Wanted::of(query).find_one(&**store).await?)),
            Self::Admin(api) => found(api, &query).await,
        }
    }

    /// What became of a change, and the line about it if it was not made.
    pub(super) async fn change(&self, query: Query, change: &Change) -> Result<(Changed, Option<Failed>), Failed> {
        match self {
            Self::Store(store, _) => {
                let before = Wanted::of(query).find_one(&**store).await?;
                let made = change.make(&**store, before).await;
                let told = change.told(&made);
                let failed = match made.outcome {
                    Outcome::Changed => None,
                    Outcome::Refused(why) => Some(Failed::NotSo(format!("nothing was changed: {why}"))),
                    Outcome::Failed(error) => Some(error.into()),
                };
                Ok((told, failed))
            }
            Self::Admin(api) => {
                let before = found(api, &query).await?;
                // Of what was just seen, unless they said of what.
                let fence = change.fence.map_or(before.fence, |fence| fence.0);
                let (verb, body) = asked(change, fence);
                let path = format!("/api/records/{}/{verb}", before.address);
                let (mut told, failed): (Changed, _) = api.post(&path, Bytes::from(body.to_string())).await?;
                // The reason as it was given, not as it was kept.
                told.reason.clone_from(&change.reason);
                Ok((told, failed))
            }
        }
    }
}

/// The path of a list.
fn listing(query: &Query, from: Option<Address>, limit: usize) -> String {
    let mut path = format!("/api/records?limit={limit}");
    let pairs = [
        ("state", query.state.map(|state| state_name(state).to_owned())),
        ("tenant", query.tenant.clone()),
        ("user", query.user.clone()),
        ("endpoint", query.endpoint.clone()),
        ("key", query.key.clone()),
        ("older_than", query.older_than.map(duration)),
        ("cursor", from.map(|from| from.to_string())),
    ];
    for (name, value) in pairs {
        if let Some(value) = value {
            path += &format!("&{name}={}", escaped(&value));
        }
    }
    path
}

async fn found(api: &Api, query: &Query) -> Result<View, Failed> {
    let address = match query.address {
        Some(address) => address.to_string(),
        None => {
            let page: Page = api.get(&listing(query, None, 2)).await?;
            match &page.records[..] {
                [only] => only.address.clone(),
                [] => return Err(NotFound::Absent.into()),
                [one, other, ..] => {
                    let [one, other] = [one, other].map(|view| Address::from_hex(&view.address));
                    let many = |one, other| NotFound::Many(one, other);
                    return Err(one.zip(other).map_or(NotFound::Restless, |(one, other)| many(one, other)).into());
                }
            }
        }
    };
    let view: View = api.get(&format!("/api/records/{address}")).await?;
    if matches(query, &view) { Ok(view) } else { Err(NotFound::Absent.into()) }
}

/// Whether an entry that was found by its address also is what else was said of it.
fn matches(query: &Query, view: &View) -> bool {
    let tag = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|want| want == have);
    let key = query.key.as_deref().is_none_or(|want| want == view.key || mask(want) == view.key);
    key && tag(&query.tenant, &view.tenant) && tag(&query.user, &view.user) && tag(&query.endpoint, &view.endpoint)
}

/// A change as the API takes it.
fn asked(change: &Change, fence: u64) -> (&'static str, Value) {
    let mut body = json!({ "reason": change.reason, "fence": fence });
    if let What::Resolve(answer) = &change.what {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let headers: Vec<_> =
            answer.headers.iter().map(|(name, value)| (name.as_str(), text(value.as_bytes()))).collect();
        let content = match std::str::from_utf8(&answer.body) {
            Ok(text) => json!(text),
            Err(_) => json!({ "hex": hex(&answer.body) }),
        };
        body["as"] = "done".into();
        body["answer"] = json!({ "status": answer.status.as_u16(), "headers": headers, "body": content });
        if let Some(keep) = answer.keep {
            body["keep"] = duration(keep).into();
        }
    }
    (change.what.verb(), body)
}

/// The API takes eighteen digits, which are more years than anything is kept.
fn duration(duration: Duration) -> String {
    format!("{}ms", millis(duration).min(999_999_999_999_999_999))
}
