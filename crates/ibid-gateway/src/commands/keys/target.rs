//! The backend of `ibid keys`: a store, or the admin API of a running gateway. Both give the same results.

use std::{io, time::Duration};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use ibid::{mask, store::Address};
use ibid_stores::OpenedStore;
use ibid_tools::CommandError;
use serde_json::{Value, json};

use super::{KeysTargetArgs, audit};
use crate::{
    commands::{admin::AdminClient, store},
    config::{self, Env, SealSettings, StoreSelection},
    format::{as_millis, now_ms},
    records::{
        AddressPattern, ChangeAction, ChangeReport, ChangeRequest, RecordList, RecordLookupError, RecordQuery,
        RecordView, RevealedKey, state_name,
    },
};

/// The store or gateway to work on. Sealed entries can be listed, released and forgotten without keys.
pub(super) enum KeysBackend {
    /// The text explains why entries may be shown sealed.
    Store(OpenedStore, String),
    Admin(AdminClient),
}

impl KeysBackend {
    /// Opens what the flags name. With `needs_keys`, a store without keys to seal with is an error.
    pub(super) async fn open(args: &KeysTargetArgs, env: &Env<'_>, needs_keys: bool) -> Result<Self, CommandError> {
        let StoreSelection { store, config } = &args.store;
        if args.admin.admin.is_some() && (store.is_some() || config.is_some()) {
            let what = "--admin cannot be used with --store or --config: a gateway knows its own store";
            return Err(CommandError::Usage(what.into()));
        }
        if let Some(api) = AdminClient::from_args(&args.admin, env)? {
            return Ok(Self::Admin(api));
        }
        let settings = config::StoreSettings::load(&args.store, env)?;
        let (seal, why) = match SealSettings::load(&args.store, env) {
            Err(why) if needs_keys => return Err(why.into()),
            Err(why) => (None, format!("the keys cannot be read: {why}")),
            Ok(None) => (None, "name the gateway's --config, with its [seal], to see what is in them".into()),
            Ok(seal) => (seal, "their keys are not in [seal], or they were altered".into()),
        };
        let sealing = seal.and_then(|seal| seal.sealing());
        if needs_keys && sealing.is_none() {
            let what = "there are no keys to seal with; name the gateway's --config, with its [seal]";
            return Err(CommandError::Usage(what.into()));
        }
        Ok(Self::Store(store::open_store(&settings, sealing).await?, why))
    }

    pub(super) fn warn_if_sealed(&self, views: &[RecordView], aside: &mut dyn io::Write) -> io::Result<()> {
        let sealed = views.iter().filter(|view| view.sealed_with.is_some()).count();
        let (Self::Store(_, why), 1..) = (self, sealed) else { return Ok(()) };
        let entries = if sealed == 1 { "1 entry is" } else { &format!("{sealed} entries are") };
        writeln!(aside, "ibid: {entries} shown sealed, with hashes for key, tenant, user and endpoint: {why}")
    }

    pub(super) async fn list(
        &self, query: RecordQuery, from: Option<Address>, limit: usize,
    ) -> Result<RecordList, CommandError> {
        match self {
            Self::Store(opened, _) => Ok(query.list(&*opened.store, from, limit).await?),
            Self::Admin(api) => api.get(&list_path(&query, from, limit)).await,
        }
    }

    pub(super) async fn find_one(&self, query: RecordQuery) -> Result<RecordView, CommandError> {
        match self {
            Self::Store(OpenedStore { store, .. }, _) => {
                Ok(RecordView::from(&query.find_one(&**store).await?).with_note(&**store, now_ms()).await)
            }
            Self::Admin(api) => fetch_one(api, &query).await,
        }
    }

    pub(super) async fn reveal(&self, query: RecordQuery, reason: &str) -> Result<RevealedKey, CommandError> {
        match self {
            Self::Store(OpenedStore { store, .. }, _) => {
                let entry = query.find_one(&**store).await?;
                audit::reveal(store, &entry, reason).await
            }
            Self::Admin(api) => {
                let path = format!("/api/records/{}/reveal", fetch_one(api, &query).await?.address);
                let (revealed, failed) = api.post(&path, Bytes::from(json!({ "reason": reason }).to_string())).await?;
                failed.map_or(Ok(revealed), Err)
            }
        }
    }

    /// Returns the report of a change, and an error if the change was not made.
    pub(super) async fn change(
        &self, query: RecordQuery, change: &ChangeRequest,
    ) -> Result<(ChangeReport, Option<CommandError>), CommandError> {
        match self {
            Self::Store(OpenedStore { store, .. }, _) => {
                let before = query.find_one(&**store).await?;
                audit::change(store, before, change).await
            }
            Self::Admin(api) => {
                let before = fetch_one(api, &query).await?;
                // Defaults to the fence of the entry that was just read.
                let fence = change.fence.map_or(before.fence, |fence| fence.0);
                let (verb, body) = change_request(change, fence);
                let path = format!("/api/records/{}/{verb}", before.address);
                let (mut told, failed): (ChangeReport, _) = api.post(&path, Bytes::from(body.to_string())).await?;
                // The reason as given, not as stored.
                told.reason.clone_from(&change.reason);
                Ok((told, failed))
            }
        }
    }
}

fn list_path(query: &RecordQuery, from: Option<Address>, limit: usize) -> String {
    let pairs = [
        ("limit", Some(limit.to_string())),
        ("address", query.address.as_ref().map(ToString::to_string)),
        ("state", query.state.map(|state| state_name(state).to_owned())),
        ("tenant", query.tenant.clone()),
        ("user", query.user.clone()),
        ("endpoint", query.endpoint.clone()),
        ("key", query.key.clone()),
        ("older_than", query.older_than.map(format_duration)),
        ("cursor", from.map(|from| from.to_string())),
    ];
    let pairs = pairs.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?)));
    format!("/api/records?{}", form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish())
}

async fn fetch_one(api: &AdminClient, query: &RecordQuery) -> Result<RecordView, CommandError> {
    let address = match query.address.as_ref().and_then(AddressPattern::whole) {
        Some(address) => address.to_string(),
        None => {
            let page: RecordList = api.get(&list_path(query, None, 2)).await?;
            match &page.records[..] {
                [only] => only.address.clone(),
                [] => return Err(RecordLookupError::NotFound.into()),
                [one, other, ..] => {
                    let both = Address::from_hex(&one.address).zip(Address::from_hex(&other.address));
                    let many = both.map(|(one, other)| RecordLookupError::Ambiguous(one, other));
                    return Err(many.unwrap_or(RecordLookupError::KeepsChanging).into());
                }
            }
        }
    };
    let view: RecordView = api.get(&format!("/api/records/{address}")).await?;
    if matches_query(query, &view) { Ok(view) } else { Err(RecordLookupError::NotFound.into()) }
}

fn matches_query(query: &RecordQuery, view: &RecordView) -> bool {
    let tag = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|want| want == have);
    // The gateway has compared the beginning of a key.
    let key = query.key.as_deref().is_none_or(|want| want == view.key || mask(want) == view.key || want.ends_with('*'));
    key && tag(&query.tenant, &view.tenant) && tag(&query.user, &view.user) && tag(&query.endpoint, &view.endpoint)
}

fn change_request(change: &ChangeRequest, fence: u64) -> (&'static str, Value) {
    let mut body = json!({ "reason": change.reason, "fence": fence });
    if let ChangeAction::Resolve(answer) = &change.action {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let headers: Vec<_> =
            answer.headers.iter().map(|(name, value)| (name.as_str(), text(value.as_bytes()))).collect();
        let content = match std::str::from_utf8(&answer.body) {
            Ok(text) => json!(text),
            Err(_) => json!({ "hex": HEXLOWER.encode(&answer.body) }),
        };
        body["as"] = "done".into();
        body["answer"] = json!({ "status": answer.status.as_u16(), "headers": headers, "body": content });
        if let Some(keep) = answer.keep {
            body["keep"] = format_duration(keep).into();
        }
    }
    (change.action.name(), body)
}

/// The API accepts at most eighteen digits.
fn format_duration(duration: Duration) -> String {
    format!("{}ms", as_millis(duration).min(999_999_999_999_999_999))
}
