//! `ibid openapi SPEC --config FILE`: adds the gateway's behaviour to an OpenAPI document.
//!
//! The document is not rewritten. It is parsed to find positions, and text is inserted: the key's parameter, the
//! refusals, the headers of replays. Existing content is kept, so a second run changes nothing.
//!
//! Invariant, checked before anything is written: the new document without the additions equals the old one, and
//! another run would add nothing.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use http::Method;
use ibid::Policy;

use self::document::OpenapiDocument;
pub use self::{annotate::AnnotateOutcome, document::DocumentError};
use crate::CommandError;

mod annotate;
mod components;
mod document;
mod edit;
mod new_value;
mod parse;

#[derive(Debug, clap::Args)]
pub struct OpenapiArgs {
    /// The OpenAPI document, 3.0 or 3.1, JSON or YAML
    #[arg(value_name = "SPEC")]
    pub spec: PathBuf,
    /// The gateway's configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// The prefix of every path, such as /v1 [default: the path of the document's servers]
    #[arg(long, value_name = "PATH", value_parser = parse_base_path)]
    pub base_path: Option<String>,
    /// Write to this file instead of standard output
    #[arg(long, value_name = "FILE", conflicts_with = "in_place")]
    pub output: Option<PathBuf>,
    /// Overwrite SPEC
    #[arg(long)]
    pub in_place: bool,
    /// Write nothing; fail if SPEC lacks anything
    #[arg(long, conflicts_with_all = ["output", "in_place"])]
    pub check: bool,
}

pub struct CoveringRoute<'a> {
    pub policy: &'a Policy,
    pub has_quota: bool,
    /// Whether this is `[policy]`, which covers the paths that no route names.
    pub is_default_policy: bool,
}

pub type FindRoute<'f, 'r> = &'f dyn Fn(&Method, &str) -> Option<CoveringRoute<'r>>;

/// Annotates and writes. Notes go to `aside`.
pub fn run(
    args: &OpenapiArgs, find_route: FindRoute<'_, '_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let name = args.spec.display();
    let given = fs::read_to_string(&args.spec)
        .map_err(|why| CommandError::Conflict(format!("{name} cannot be read: {why}")))?;
    let done = annotate_file(&given, &args.spec, find_route, args.base_path.as_deref())
        .map_err(|DocumentError { line, why }| CommandError::Conflict(format!("{name}: line {line}: {why}")))?;
    for (line, note) in &done.notes {
        writeln!(aside, "ibid: {name}: line {line}: {note}")?;
    }
    let same = done.text == given;
    if done.covered == 0 {
        let then = "do the paths of its servers and the routes agree? See --base-path";
        writeln!(aside, "ibid: {name}: none of {} operations is covered; {then}", done.operations)?;
    } else {
        let what = match (same, done.undescribed) {
            (true, 0) => "nothing was missing".to_owned(),
            (false, 0) => "annotated".to_owned(),
            (true, left) => format!("nothing can be added, and {left} of its responses do not describe refusals"),
            (false, left) => format!("annotated, but {left} of its responses do not describe refusals"),
        };
        writeln!(aside, "ibid: {name}: {} of {} operations covered; {what}", done.covered, done.operations)?;
    }
    if args.check {
        let why = || format!("{name} does not say all that {} promises", args.config.display());
        return (same && done.undescribed == 0).then_some(()).ok_or_else(|| CommandError::Conflict(why()));
    }
    let file = args.output.as_ref().or_else(|| args.in_place.then_some(&args.spec));
    match file {
        None => Ok(out.write_all(done.text.as_bytes())?),
        Some(_) if args.in_place && same => Ok(()),
        Some(path) => write_atomically(path, &done.text)
            .map_err(|why| CommandError::Conflict(format!("{} cannot be written: {why}", path.display()))),
    }
}

/// Writes a file. Replaces an existing one atomically, and follows symbolic links.
fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let Ok(path) = fs::canonicalize(path) else { return fs::write(path, text) };
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    io::Write::write_all(&mut file, text.as_bytes())?;
    file.as_file().set_permissions(fs::metadata(&path)?.permissions())?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

fn annotate_file(
    given: &str, path: &Path, find_route: FindRoute<'_, '_>, base: Option<&str>,
) -> Result<AnnotateOutcome, DocumentError> {
    let is_yaml =
        path.extension().is_some_and(|name| name.eq_ignore_ascii_case("yaml") || name.eq_ignore_ascii_case("yml"));
    annotate_text(given, is_yaml, find_route, base)
}

/// Annotates a document.
///
/// # Errors
/// Returns an error if the document is invalid, or if the result is not the document with additions.
pub fn annotate_text(
    given: &str, is_yaml: bool, find_route: FindRoute<'_, '_>, base: Option<&str>,
) -> Result<AnnotateOutcome, DocumentError> {
    // Removes the byte order mark for parsers that do not accept it.
    let (mark, given) = given.strip_prefix('\u{feff}').map_or(("", given), |rest| ("\u{feff}", rest));
    let old = parse_document(given, is_yaml)?;
    let mut done = annotate::annotate(&old, find_route, base)?;
    let broken = |why: &str| DocumentError {
        line: 1,
        why: format!("{why}; nothing was written. This is a fault of ibid: please report it with the document"),
    };
    let new = parse_document(&done.text, is_yaml)
        .map_err(|wrong| broken(&format!("with the additions, line {} is wrong: {}", wrong.line, wrong.why)))?;
    if !document::is_only_extended((&old, &old.root), (&new, &new.root)) {
        return Err(broken("the additions would change what is there"));
    }
    if annotate::annotate(&new, find_route, base).map_err(|_| broken("the additions cannot be read back"))?.text
        != done.text
    {
        return Err(broken("a second run would add more"));
    }
    done.text.insert_str(0, mark);
    Ok(done)
}

/// Parses JSON if the text looks like JSON, else YAML. YAML that looks like JSON needs `is_yaml`.
fn parse_document(text: &str, is_yaml: bool) -> Result<OpenapiDocument, DocumentError> {
    if !text.trim_start().starts_with('{') {
        return parse::read_yaml(text.to_owned());
    }
    match parse::read_json(text.to_owned()) {
        Err(_) if is_yaml => parse::read_yaml(text.to_owned()),
        read => read,
    }
}

fn parse_base_path(text: &str) -> Result<String, String> {
    match text.trim_end_matches('/') {
        "" => Ok(String::new()),
        base if base.starts_with('/') => Ok(base.to_owned()),
        _ => Err(format!("{text:?} is no path; write /v1, or / for none")),
    }
}

#[cfg(test)]
mod tests;
