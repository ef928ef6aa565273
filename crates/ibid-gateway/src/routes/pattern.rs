//! The `match` of a route, such as `POST|PUT /payments/:id/*` or `grpc shop.Orders/Create`.

use std::{fmt, str::FromStr};

use http::Method;
use ibid::http::Protocol;

use super::path;

/// The `match` of a route: methods and a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    pub protocol: Protocol,
    pub methods: Vec<Method>,
    pub pattern: PathPattern,
}

/// A path with `:name` for one segment and `*` for the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern {
    pub(crate) text: String,
    shape: PatternShape,
    /// Other ways in which an app may [read](path::readings) the pattern.
    alternatives: Vec<PatternShape>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PatternShape {
    segments: Vec<PatternSegment>,
    /// The pattern ends with `*`, which matches anything after the last slash, also nothing.
    has_wildcard: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternSegment {
    Literal(Vec<u8>),
    /// Any segment that is not empty.
    Any,
}

/// How strictly a path is compared with a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PathComparison {
    pub(super) ignore_case: bool,
    /// Ignores one slash at the end of the path or of the pattern.
    pub(super) ignore_trailing_slash: bool,
}

impl PathComparison {
    pub(super) const EXACT: Self = Self { ignore_case: false, ignore_trailing_slash: false };
    pub(super) const LOOSE: Self = Self { ignore_case: true, ignore_trailing_slash: true };
    pub(super) const ALL_MODES: [Self; 4] = [
        Self::EXACT,
        Self { ignore_case: false, ignore_trailing_slash: true },
        Self { ignore_case: true, ignore_trailing_slash: false },
        Self::LOOSE,
    ];
}

impl PathPattern {
    /// Parses a gRPC pattern: `*`, `shop.Orders/*` or `shop.Orders/Create`.
    fn for_grpc(name: &str) -> Option<Self> {
        let word = |word: &str| {
            word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                && word.bytes().next().is_some_and(|first| !first.is_ascii_digit())
        };
        let segments = match name.split_once('/') {
            None if name == "*" => vec![PatternSegment::Any, PatternSegment::Any],
            Some((service, method)) if service.split('.').all(word) && (method == "*" || word(method)) => {
                let method = if method == "*" { PatternSegment::Any } else { PatternSegment::Literal(method.into()) };
                vec![PatternSegment::Literal(service.into()), method]
            }
            _ => return None,
        };
        let shape = PatternShape { segments, has_wildcard: false };
        Some(Self { text: format!("/{name}"), shape, alternatives: Vec::new() })
    }

    /// For gRPC: whether the pattern names a single method.
    pub(crate) fn is_single_method(&self) -> bool {
        !self.shape.segments.contains(&PatternSegment::Any)
    }

    /// For gRPC: the service that the pattern names.
    pub(crate) fn service(&self) -> Option<&str> {
        match self.shape.segments.first() {
            Some(PatternSegment::Literal(service)) => std::str::from_utf8(service).ok(),
            _ => None,
        }
    }

    /// Whether the pattern matches a [normalised](path::normalise) path.
    pub fn matches(&self, path: &str) -> bool {
        self.shape.matches(path.as_bytes(), PathComparison::EXACT)
    }

    /// Whether some reading of the pattern matches a [reading](path::readings) of a path.
    pub(super) fn matches_reading(&self, reading: &[u8], compared: PathComparison) -> bool {
        self.shape.matches(reading, compared) || self.alternatives.iter().any(|other| other.matches(reading, compared))
    }

    /// For `/a/*` the pattern `/a`, which `/a/*` does not match. `None` for other patterns and for `/*`.
    pub(crate) fn bare(&self) -> Option<Self> {
        self.text.strip_suffix("/*").filter(|bare| !bare.is_empty()).and_then(|bare| bare.parse().ok())
    }

    /// Whether this pattern matches every path that `other` matches.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let (this, other) = (&self.shape, &other.shape);
        let (mine, theirs) = (this.segments.len(), other.segments.len());
        let lengths = if this.has_wildcard {
            mine < theirs + usize::from(other.has_wildcard)
        } else {
            !other.has_wildcard && mine == theirs
        };
        lengths && mine <= theirs && this.zip(other).all(|(mine, theirs)| mine.covers(theirs))
    }

    /// Whether some path matches both patterns.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (this, other) = (&self.shape, &other.shape);
        let (mine, theirs) = (this.segments.len(), other.segments.len());
        let lengths = match (this.has_wildcard, other.has_wildcard) {
            (true, true) => true,
            (true, false) => mine < theirs,
            (false, true) => theirs < mine,
            (false, false) => mine == theirs,
        };
        lengths && this.zip(other).all(|(mine, theirs)| mine.covers(theirs) || theirs.covers(mine))
    }
}

impl PatternShape {
    fn parse(reading: &[u8]) -> Self {
        let path = reading.strip_prefix(b"/").unwrap_or(reading);
        let mut pieces: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let has_wildcard = pieces.last() == Some(&&b"*"[..]);
        if has_wildcard {
            pieces.pop();
        }
        let segment = |piece: &&[u8]| {
            if piece.starts_with(b":") { PatternSegment::Any } else { PatternSegment::Literal(piece.to_vec()) }
        };
        Self { segments: pieces.iter().map(segment).collect(), has_wildcard }
    }

    fn zip<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a PatternSegment, &'a PatternSegment)> {
        self.segments.iter().zip(&other.segments)
    }

    fn matches(&self, path: &[u8], compared: PathComparison) -> bool {
        let Some(mut path) = path.strip_prefix(b"/") else { return false };
        let mut segments = &self.segments[..];
        if compared.ignore_trailing_slash && !self.has_wildcard {
            path = path.strip_suffix(b"/").unwrap_or(path);
            if let [before @ .., PatternSegment::Literal(last)] = segments
                && last.is_empty()
                && !before.is_empty()
            {
                segments = before;
            }
        }
        let mut given = path.split(|byte| *byte == b'/');
        for segment in segments {
            match given.next() {
                Some(given) if segment.matches(given, compared.ignore_case) => {}
                _ => return false,
            }
        }
        given.next().is_some() == self.has_wildcard
    }
}

impl PatternSegment {
    /// Whether this segment matches everything that `other` matches.
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Any, Self::Any) => true,
            (Self::Any, Self::Literal(text)) => !text.is_empty(),
            (Self::Literal(_), Self::Any) => false,
            (Self::Literal(one), Self::Literal(two)) => one == two,
        }
    }

    fn matches(&self, given: &[u8], any_case: bool) -> bool {
        match self {
            Self::Literal(text) if any_case => text.eq_ignore_ascii_case(given),
            Self::Literal(text) => text == given,
            Self::Any => !given.is_empty(),
        }
    }
}

impl FromStr for Match {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!("{text:?} is no match{why}; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"")
        };
        if let Some(name) = text.strip_prefix("grpc").filter(|rest| rest.is_empty() || rest.starts_with(' ')) {
            let pattern = PathPattern::for_grpc(name.strip_prefix(' ').unwrap_or(name)).ok_or_else(|| {
                format!(
                    "{text:?} is no match; write \"grpc package.Service/Method\", \"grpc package.Service/*\" or \"grpc *\""
                )
            })?;
            return Ok(Self { protocol: Protocol::Grpc, methods: vec![Method::POST], pattern });
        }
        if text.starts_with('/') {
            return Err(wrong(", it names no method"));
        }
        let (methods, pattern) = text.split_once(' ').ok_or_else(|| wrong(", it has no pattern"))?;
        let mut found: Vec<Method> = Vec::new();
        for name in methods.split('|') {
            if name == "*" {
                return Err(wrong(", \"*\" is no method"));
            }
            if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-') {
                return Err(wrong(&format!(", {name:?} is no method (they are upper case)")));
            }
            let method = Method::from_str(name).map_err(|_| wrong(&format!(", {name:?} is no method")))?;
            if found.contains(&method) {
                return Err(wrong(&format!(", it has {name} twice")));
            }
            found.push(method);
        }
        let pattern = pattern.parse().map_err(|why: String| wrong(&why))?;
        Ok(Self { protocol: Protocol::Http, methods: found, pattern })
    }
}

impl FromStr for PathPattern {
    /// Starts with a comma, because the caller continues a sentence with it.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'?' | b'#');
        let Some(path) = text.strip_prefix('/').filter(|_| text.bytes().all(plain)) else {
            return Err(", its pattern is no path".into());
        };
        let readings = path::readings(text);
        if readings.has_dot_segments {
            return Err(", its pattern has dot segments, which never match".into());
        }
        let is_name =
            |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        for piece in path.strip_suffix("/*").unwrap_or(if path == "*" { "" } else { path }).split('/') {
            if piece.contains('*') {
                return Err(", \"*\" stands only for the whole rest, at the end".into());
            }
            if piece.strip_prefix(':').is_some_and(|name| !is_name(name)) {
                return Err(format!(", {piece:?} is no \":name\" (letters, digits and _)"));
            }
        }
        let mut shapes = readings.paths.iter().map(|reading| PatternShape::parse(reading));
        let shape = shapes.next().expect("the path itself is a reading");
        Ok(Self { text: text.into(), shape, alternatives: shapes.collect() })
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.protocol == Protocol::Grpc {
            return write!(f, "grpc {}", &self.pattern.text[1..]);
        }
        for (at, method) in self.methods.iter().enumerate() {
            write!(f, "{}{method}", if at == 0 { "" } else { "|" })?;
        }
        write!(f, " {}", self.pattern)
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> PathPattern {
        text.parse().unwrap()
    }

    #[test]
    fn names_stand_for_one_segment_and_the_star_for_the_rest() {
        for (text, matching, other) in [
            ("/a", &["/a"][..], &["/a/", "/A", "/", "/a/b", "a", "*", ""][..]),
            ("/a/", &["/a/"], &["/a", "/a/b"]),
            ("/a/*", &["/a/", "/a/b", "/a/b/c"], &["/a", "/ab", "/b/a"]),
            ("/*", &["/", "/a", "/a/b"], &["*", ""]),
            ("/a/:id/b", &["/a/1/b"], &["/a//b", "/a/1/2/b", "/a/1/b/"]),
            ("/a/:id/*", &["/a/1/", "/a/1/x/y"], &["/a/1", "/a//x"]),
            ("/%61%2d", &["/a-"], &["/%61-"]),
            ("/@:scope%2fname", &["/@:scope%2Fname"], &["/@:scope/name"]),
            ("/a//b", &["/a//b"], &["/a/b"]),
        ] {
            for path in matching {
                assert!(pattern(text).matches(path), "{text} {path}");
            }
            for path in other {
                assert!(!pattern(text).matches(path), "{text} {path}");
            }
        }
    }

    #[test]
    fn case_and_a_slash_at_the_end_make_no_difference_to_a_reading() {
        for (text, loosely, never) in [
            ("/a/B", &["/A/b", "/a/b/", "/A/B/"][..], &["/a/b/c", "/a", "/a/b//"][..]),
            ("/a/", &["/a", "/A/"], &["/", "/a/b"]),
            ("/", &["/", "//"], &["/a"]),
            ("/a/*", &["/A/", "/A/b/"], &["/a", "/A"]),
            ("/a/:id", &["/A/1/", "/a/X"], &["/a", "/a/", "/a//"]),
            // The pattern is read in every way in which an app may read a path.
            ("/x%2Fy", &["/x/y", "/X/Y/", "/x%2Fy"], &["/xy"]),
            ("/a//b;c/:id", &["/a/b/1", "/a//b/1"], &["/a/b"]),
        ] {
            for path in loosely {
                assert!(pattern(text).matches_reading(path.as_bytes(), PathComparison::LOOSE), "{text} {path}");
            }
            for path in never {
                assert!(!pattern(text).matches_reading(path.as_bytes(), PathComparison::LOOSE), "{text} {path}");
            }
        }
    }

    #[test]
    fn covering_and_overlapping_agree_with_matching() {
        let all =
            ["/", "/*", "/a", "/a/", "/a/*", "/a/b", "/a/:x", "/:x/b", "/:x/:y", "/:x/*", "/a/b/*", "/:x", "/a/:x/c"];
        let paths = [
            "/", "/a", "/a/", "/a/b", "/b/b", "/c/d", "/a/b/", "/a/b/c", "/a/d/c", "/a/z", "/b/", "/b", "/c/d/e/f",
            "/a//c",
        ];
        for one in all.map(pattern) {
            for two in all.map(pattern) {
                let both = paths.iter().any(|path| one.matches(path) && two.matches(path));
                let within = paths.iter().all(|path| one.matches(path) || !two.matches(path));
                assert_eq!(one.overlaps(&two), both, "{one} overlaps {two}");
                assert_eq!(one.covers(&two), within, "{one} covers {two}");
            }
        }
    }

    #[test]
    fn calls_are_named_by_service_and_method() {
        for (text, matching, other) in [
            ("grpc shop.v1.Orders/Create", &["/shop.v1.Orders/Create"][..], &["/shop.v1.Orders/Creat", "/Create"][..]),
            ("grpc Orders/*", &["/Orders/A", "/Orders/B"], &["/Orders/", "/Orders", "/Orders/A/B", "/Other/A"]),
            ("grpc *", &["/a.B/C"], &["/a.B", "/a.B/C/D", "/"]),
        ] {
            let found: Match = text.parse().unwrap();
            assert_eq!((found.protocol, found.to_string().as_str()), (Protocol::Grpc, text));
            matching.iter().for_each(|path| assert!(found.pattern.matches(path), "{text} {path}"));
            other.iter().for_each(|path| assert!(!found.pattern.matches(path), "{text} {path}"));
        }
        for text in
            ["grpc", "grpc ", "grpc /a.B/C", "grpc a.B", "grpc a.B/", "grpc a.*/C", "grpc  a.B/C", "grpc a.B/C/D"]
        {
            let why = text.parse::<Match>().unwrap_err();
            assert!(
                why.ends_with("write \"grpc package.Service/Method\", \"grpc package.Service/*\" or \"grpc *\""),
                "{why}"
            );
        }
    }

    #[test]
    fn what_is_no_match_is_told_why() {
        for (text, why) in [
            ("/a", ", it names no method"),
            ("POST", ", it has no pattern"),
            ("* /a", ", \"*\" is no method"),
            ("post /a", ", \"post\" is no method (they are upper case)"),
            ("POST| /a", ", \"\" is no method (they are upper case)"),
            ("POST|POST /a", ", it has POST twice"),
            ("POST a", ", its pattern is no path"),
            ("POST  /a", ", its pattern is no path"),
            ("POST /a?b", ", its pattern is no path"),
            ("POST /a/*/b", ", \"*\" stands only for the whole rest, at the end"),
            ("POST /a*", ", \"*\" stands only for the whole rest, at the end"),
            ("POST /a/:", ", \":\" is no \":name\" (letters, digits and _)"),
            ("POST /a/..;x/b", ", its pattern has dot segments, which never match"),
            ("POST /a/../b", ", its pattern has dot segments, which never match"),
        ] {
            let line =
                format!("{text:?} is no match{why}; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"");
            assert_eq!(text.parse::<Match>(), Err(line));
        }
        assert_eq!("POST|PUT /a/:id".parse::<Match>().unwrap().to_string(), "POST|PUT /a/:id");
    }
}
