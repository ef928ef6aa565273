//! The `[seal]` table: the encryption of records and the secret of addresses.

use std::fmt;

use data_encoding::BASE64;
use ibid::scope::AddressSecret;
use ibid_stores::seal::{SealKey, SealOptions, Sealer};

use super::{args::config_path, env::Env, error::ConfigError, raw, read_table, secret::Secret, store::StoreSelection};

const ALLOWED_KEY: &str = "allowed are 32 random bytes in base64, as `openssl rand -base64 32` prints them";

/// How records are sealed. `Debug` shows no key and no secret.
#[derive(Debug, Clone)]
pub struct SealSettings {
    /// The first key seals; all keys open. Empty: only addresses are keyed.
    keys: Vec<SealKey>,
    address_secret: SealKeyBytes,
    plain_addresses: bool,
    rules: SealOptions,
    /// Shared with the stores and the journal that use it.
    sealing: Option<Sealer>,
}

#[derive(Clone, PartialEq, Eq)]
struct SealKeyBytes([u8; 32]);

impl SealSettings {
    /// Reads only the `[seal]` table of the file that `choice` names. `None` if there is no such table.
    pub fn load(choice: &StoreSelection, env: &Env<'_>) -> Result<Option<Self>, ConfigError> {
        let Some(path) = config_path(choice.config.as_ref(), env)? else { return Ok(None) };
        let read = || {
            let (seal, file) = read_table(&path, env, "seal")?;
            let compress = file.get("store").and_then(|store| store.get("compress")).and_then(toml::Value::as_bool);
            seal.map(|seal| build_seal(seal, compress.unwrap_or(true))).transpose()
        };
        read().map_err(|why: ConfigError| why.in_file(Some(&path)))
    }

    /// The sealer of stores and the journal; `None` if only addresses are keyed. A reload changes its keys, not the
    /// sealer.
    pub fn sealing(&self) -> Option<Sealer> {
        self.sealing.clone()
    }

    /// The secret that keys addresses, unless addresses are plain.
    pub fn address_secret(&self) -> Option<AddressSecret> {
        (!self.plain_addresses).then(|| AddressSecret::new(self.address_secret.0))
    }

    /// Describes the keys by name, and the options, for people.
    pub fn description(&self) -> String {
        let mut parts = Vec::new();
        if let [first, others @ ..] = &self.keys[..] {
            let others = others.iter().map(|key| format!(", {} (opens)", key.id()));
            parts.push(format!("keys {} (seals, opens){}", first.id(), others.collect::<String>()));
            let plain = if self.rules.accept_plain { "accepted" } else { "refused" };
            parts.push(format!("what is not sealed is {plain}"));
        }
        parts.push(format!("addresses are {}", if self.plain_addresses { "plain" } else { "keyed" }));
        parts.join("; ")
    }

    pub fn accepts_plain(&self) -> bool {
        self.rules.accept_plain
    }

    /// Whether a reader of the store can test guesses of keys.
    pub fn has_plain_addresses(&self) -> bool {
        self.plain_addresses
    }

    /// Takes over the open sealer of `before`. [`activate_keys`](Self::activate_keys) installs the keys of this
    /// configuration.
    pub(crate) fn reuse_sealing(&mut self, before: &Self) {
        if self.sealing.is_some() {
            self.sealing.clone_from(&before.sealing);
        }
    }

    pub(crate) fn activate_keys(&self) {
        if let (Some(sealing), [first, others @ ..]) = (&self.sealing, &self.keys[..]) {
            sealing.rekey(first.clone(), others.to_vec(), self.rules);
        }
    }

    /// Whether the two differ in a setting that is only read at start-up.
    pub(super) fn needs_restart(old: Option<&Self>, new: Option<&Self>) -> bool {
        let fixed = |seal: &Self| (seal.address_secret.clone(), seal.plain_addresses, seal.keys.is_empty());
        old.map(fixed) != new.map(fixed)
    }

    /// Returns one sentence per group of answers that the change forgets.
    pub(super) fn forgotten_answers(old: Option<&Self>, new: Option<&Self>) -> Vec<String> {
        let keyed =
            |seal: Option<&Self>| seal.filter(|seal| !seal.plain_addresses).map(|seal| seal.address_secret.clone());
        let sealed =
            |seal: Option<&Self>| seal.filter(|seal| !seal.keys.is_empty()).map(|seal| seal.address_secret.clone());
        let rekeyed = match (keyed(old), keyed(new)) {
            (None, Some(_)) => Some("keys addresses that were plain"),
            (Some(_), None) => Some("no longer keys addresses"),
            (old, new) => (old != new).then_some("changed"),
        };
        let lost = match (rekeyed, sealed(old), sealed(new)) {
            (Some(what), ..) => {
                let lost = "every address is another, and nothing that is remembered will be found again";
                format!("seal.address_secret {what}: {lost}")
            }
            (None, Some(old), Some(new)) if old != new => {
                "seal.address_secret changed: remembered requests will not be recognised again".into()
            }
            (None, Some(_), None) => "seal.keys removed: what is sealed will not be opened again".into(),
            (None, None, Some(_)) if !new.is_some_and(Self::accepts_plain) => {
                "seal.keys added, and seal.accept_plain is off: what is remembered in clear will be refused".into()
            }
            _ => return Vec::new(),
        };
        vec![lost]
    }
}

/// Compares the settings, not the sealer.
impl PartialEq for SealSettings {
    fn eq(&self, other: &Self) -> bool {
        let read = |seal: &Self| (seal.keys.clone(), seal.address_secret.clone(), seal.plain_addresses, seal.rules);
        read(self) == read(other)
    }
}

impl fmt::Debug for SealKeyBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("****")
    }
}

pub(super) fn build_seal(file: raw::RawSeal, compress: bool) -> Result<SealSettings, ConfigError> {
    let wrong = |name: &str, what: &str| ConfigError::at(format!("seal.{name}"), what);
    let raw::RawSeal { keys: written, address_secret, accept_plain, plain_addresses } = file;
    let mut keys: Vec<SealKey> = Vec::new();
    for (at, written) in written.into_iter().enumerate() {
        let wrong = |name: &str, what: &str| wrong(&format!("keys[{}].{name}", at + 1), what);
        let id = written.id.ok_or_else(|| wrong("id", "missing; name the key, such as \"2026-11\""))?;
        let missing = "missing; write one such as \"file:seal-2026-11.key\" or \"env:IBID_SEAL_KEY\"";
        let key = written.key.ok_or_else(|| wrong("key", missing))?;
        let bytes = decode_key(&key).map_err(|what| wrong("key", &what))?;
        let key = SealKey::new(&id, bytes).map_err(|what| wrong("id", &what.to_string()))?;
        if let Some(known) = keys.iter().find(|known| known.id() == id) {
            return Err(wrong("id", &format!("{:?} is there twice; each key has its own", known.id())));
        }
        if let Some(known) = keys.iter().find(|known| known.has_key_bytes(&bytes)) {
            return Err(wrong("key", &format!("it is the same as that of {:?}; each id has its own", known.id())));
        }
        keys.push(key);
    }
    let secret = address_secret.ok_or_else(|| {
        let what = "missing; addresses, tags and fingerprints are keyed with it, and it never changes";
        wrong("address_secret", &format!("{what}; {ALLOWED_KEY}"))
    })?;
    let secret = decode_key(&secret).map_err(|what| wrong("address_secret", &what))?;
    if let Some(key) = keys.iter().find(|key| key.has_key_bytes(&secret)) {
        let what = format!("it is the same as the key {:?}, which will change one day; it needs its own", key.id());
        return Err(wrong("address_secret", &what));
    }
    let rules = SealOptions { accept_plain, compress };
    if keys.is_empty() && (accept_plain || plain_addresses) {
        let name = if accept_plain { "accept_plain" } else { "plain_addresses" };
        return Err(wrong(name, &format!("without seal.keys nothing is sealed; leave {name:?} out, or add a key")));
    }
    let sealing = match &keys[..] {
        [] => None,
        [first, others @ ..] => Some(Sealer::new(first.clone(), others.to_vec(), &secret, rules)),
    };
    Ok(SealSettings { keys, address_secret: SealKeyBytes(secret), plain_addresses, rules, sealing })
}

/// The error message reveals only the length of the value.
fn decode_key(written: &Secret) -> Result<[u8; 32], String> {
    let bytes = BASE64.decode(written.expose().trim().as_bytes());
    let bytes = bytes.map_err(|_| format!("it is no base64; {ALLOWED_KEY}"))?;
    let bytes = <[u8; 32]>::try_from(bytes).map_err(|bytes| format!("it has {} bytes; {ALLOWED_KEY}", bytes.len()))?;
    if bytes.iter().all(|byte| *byte == bytes[0]) {
        return Err(format!("its bytes are all the same; {ALLOWED_KEY}"));
    }
    Ok(bytes)
}
