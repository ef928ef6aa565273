//! The unary methods of a server, by name or from its descriptors.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use prost::Message;
use prost_types::{FileDescriptorSet, MethodDescriptorProto, method_options::IdempotencyLevel};

/// The unary methods of a server: one request message, one response message. Only these are covered.
///
/// ```
/// use ibid::grpc::UnaryMethods;
///
/// let unary = UnaryMethods::methods(["shop.Orders/Create", "shop.Orders/Cancel"]);
/// assert!(unary.contains("/shop.Orders/Create"));
/// assert!(!unary.contains("/shop.Orders/Watch"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnaryMethods {
    /// By path, such as `/shop.Orders/Create`.
    methods: BTreeMap<String, MethodKind>,
}

/// Packages of services about the server itself.
const SERVER_INTERNAL_PACKAGES: [&str; 2] = ["grpc.health", "grpc.reflection"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MethodKind {
    Covered,
    /// A unary method that needs no protection: it declares that it has no side effects, or it is about the server's
    /// health.
    NoSideEffects,
    Streaming,
}

/// A name that is not a unary method.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MethodNameError(String);

/// Why bytes are not a usable descriptor set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The bytes are not a `google.protobuf.FileDescriptorSet`.
    #[error("it is no FileDescriptorSet; make one with protoc --descriptor_set_out, or buf build -o FILE.binpb")]
    Malformed,
    /// The set contains no service.
    #[error("it has no service in it")]
    NoService,
}

impl UnaryMethods {
    /// Lists methods as `package.Service/Method`, with or without a leading slash.
    ///
    /// # Panics
    /// If a name has another form: it would never match, and its calls would run unprotected.
    pub fn methods<N: AsRef<str>>(names: impl IntoIterator<Item = N>) -> Self {
        let path = |name: N| (method_path(name.as_ref()).unwrap_or_else(|why| panic!("{why}")), MethodKind::Covered);
        Self { methods: names.into_iter().map(path).collect() }
    }

    /// Reads the unary methods of all services in a `google.protobuf.FileDescriptorSet`, as written by protoc, buf,
    /// protox and tonic's build, or [fetched](super::fetch_descriptors) from a server.
    ///
    /// Methods with `option idempotency_level = NO_SIDE_EFFECTS` and the services `grpc.health.*` and
    /// `grpc.reflection.*` are not covered and pass through unchanged, like GET requests.
    ///
    /// # Errors
    /// If the bytes are not such a set, or contain no service.
    pub fn from_descriptor_set(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let set = FileDescriptorSet::decode(bytes).map_err(|_| DescriptorError::Malformed)?;
        let mut methods = BTreeMap::new();
        for file in &set.file {
            let package = file.package();
            let dot = if package.is_empty() { "" } else { "." };
            for service in &file.service {
                let path =
                    |method: &MethodDescriptorProto| format!("/{package}{dot}{}/{}", service.name(), method.name());
                methods.extend(service.method.iter().map(|method| (path(method), method_kind(method, package))));
            }
        }
        if methods.is_empty() { Err(DescriptorError::NoService) } else { Ok(Self { methods }) }
    }

    /// Keeps only these methods, each as `package.Service/Method` or, for a whole service, `package.Service/*`.
    ///
    /// # Errors
    /// If one of them is not known to be unary.
    pub fn restricted_to<N: AsRef<str>>(mut self, names: impl IntoIterator<Item = N>) -> Result<Self, MethodNameError> {
        let mut kept = BTreeSet::new();
        for name in names {
            let name = name.as_ref();
            match name.strip_suffix("/*") {
                Some(service) => {
                    let before = kept.len();
                    kept.extend(self.covered_in_service(service).map(str::to_owned));
                    if kept.len() == before {
                        return Err(MethodNameError(format!("{service:?} has no unary method that is known")));
                    }
                }
                None => {
                    let path = method_path(name).map_err(MethodNameError)?;
                    match self.methods.get_mut(&path) {
                        None => return Err(MethodNameError(format!("{name:?} is not known"))),
                        Some(MethodKind::Streaming) => {
                            let why = format!("{name:?} is a streaming method; only unary ones are covered");
                            return Err(MethodNameError(why));
                        }
                        // A method without side effects is covered if it is named explicitly.
                        Some(kind) => *kind = MethodKind::Covered,
                    }
                    kept.insert(path);
                }
            }
        }
        self.methods.retain(|path, _| kept.contains(path));
        Ok(self)
    }

    /// Whether no method is known.
    pub fn is_empty(&self) -> bool {
        self.methods.is_empty()
    }

    /// Whether calls with this path, such as `/shop.Orders/Create`, are covered.
    pub fn contains(&self, path: &str) -> bool {
        self.methods.get(path) == Some(&MethodKind::Covered)
    }

    /// Whether the method with this path is known, covered or not. Methods of `grpc.health.*` and `grpc.reflection.*`
    /// always are.
    pub fn is_known(&self, path: &str) -> bool {
        path.strip_prefix('/').is_some_and(is_server_internal) || self.methods.contains_key(path)
    }

    /// Whether the method with this path is known to stream.
    pub fn is_streaming(&self, path: &str) -> bool {
        self.methods.get(path) == Some(&MethodKind::Streaming)
    }

    /// The paths of all covered methods, sorted.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.methods.iter().filter(|(_, kind)| **kind == MethodKind::Covered).map(|(path, _)| path.as_str())
    }

    /// The paths of the covered methods of a service, such as `shop.Orders`.
    pub fn covered_in_service(&self, service: &str) -> impl Iterator<Item = &str> {
        self.paths().filter(move |path| is_in_service(path, service))
    }

    /// The paths of all known methods of a service, including streaming ones.
    pub fn known_in_service(&self, service: &str) -> impl Iterator<Item = &str> {
        self.methods.keys().map(String::as_str).filter(move |path| is_in_service(path, service))
    }
}

fn is_in_service(path: &str, service: &str) -> bool {
    path[1..].split_once('/').is_some_and(|(own, _)| own == service)
}

impl fmt::Display for UnaryMethods {
    /// `shop.Orders/Cancel, shop.Orders/Create`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, path) in self.paths().enumerate() {
            write!(f, "{}{}", if at == 0 { "" } else { ", " }, &path[1..])?;
        }
        Ok(())
    }
}

/// Converts a name with or without leading slash to `/package.Service/Method`.
fn method_path(name: &str) -> Result<String, String> {
    let bare = name.strip_prefix('/').unwrap_or(name);
    let word = |word: &str| {
        word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && word.bytes().next().is_some_and(|first| !first.is_ascii_digit())
    };
    let fits = bare.split_once('/').is_some_and(|(service, method)| service.split('.').all(word) && word(method));
    fits.then(|| format!("/{bare}")).ok_or_else(|| {
        format!("{name:?} is no gRPC method; write package.Service/Method, such as \"shop.Orders/Create\"")
    })
}

fn method_kind(method: &MethodDescriptorProto, package: &str) -> MethodKind {
    let declares_none = || {
        method.options.as_ref().is_some_and(|options| options.idempotency_level() == IdempotencyLevel::NoSideEffects)
    };
    match method {
        method if method.client_streaming() || method.server_streaming() => MethodKind::Streaming,
        _ if is_server_internal(&format!("{package}.")) || declares_none() => MethodKind::NoSideEffects,
        _ => MethodKind::Covered,
    }
}

/// Whether a full name, such as `grpc.health.v1.Health`, belongs to a service about the server itself.
fn is_server_internal(name: &str) -> bool {
    SERVER_INTERNAL_PACKAGES.iter().any(|own| name.strip_prefix(own).is_some_and(|rest| rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOP: &str = r#"
        syntax = "proto3";
        package shop.v1;
        message Order { string id = 1; }
        service Orders {
            rpc Create(Order) returns (Order);
            rpc Cancel(Order) returns (Order) { option deprecated = true; }
            rpc Get(Order) returns (Order) { option idempotency_level = NO_SIDE_EFFECTS; }
            rpc Put(Order) returns (Order) { option idempotency_level = IDEMPOTENT; }
            rpc Watch(Order) returns (stream Order);
            rpc Upload(stream Order) returns (Order);
            rpc Chat(stream Order) returns (stream Order);
        }
    "#;

    fn compiled(files: &[(&str, &str)]) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let set = protox::compile(files.iter().map(|(name, _)| name), [folder.path()]).unwrap();
        set.encode_to_vec()
    }

    #[test]
    fn a_compiled_descriptor_set_says_which_methods_are_unary() {
        let bare = "syntax = \"proto3\"; message M {} service Bare { rpc Do(M) returns (M); }";
        let health = "syntax = \"proto3\"; package grpc.health.v1; message H {}
                      service Health { rpc Check(H) returns (H); }";
        let bytes = compiled(&[("shop.proto", SHOP), ("bare.proto", bare), ("health.proto", health)]);
        let unary = UnaryMethods::from_descriptor_set(&bytes).unwrap();
        assert_eq!(unary.to_string(), "Bare/Do, shop.v1.Orders/Cancel, shop.v1.Orders/Create, shop.v1.Orders/Put");
        assert!(unary.is_streaming("/shop.v1.Orders/Chat"));
        assert!(!unary.is_streaming("/shop.v1.Orders/Get") && !unary.contains("/shop.v1.Orders/Get"));
        assert!(unary.is_known("/shop.v1.Orders/Chat") && unary.is_known("/shop.v1.Orders/Get"));
        assert!(!unary.is_known("/shop.v1.Orders/Other") && !unary.is_known("/grpc.healthy/Check"));
        assert!(UnaryMethods::default().is_known("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"));
        assert_eq!(unary.covered_in_service("shop.v1.Orders").count(), 3);
        assert_eq!(unary.known_in_service("shop.v1.Orders").count(), 7);
    }

    #[test]
    fn some_of_them_can_be_chosen() {
        let all = UnaryMethods::from_descriptor_set(&compiled(&[("shop.proto", SHOP)])).unwrap();
        let some = all.clone().restricted_to(["shop.v1.Orders/Create", "shop.v1.Orders/Get"]).unwrap();
        assert_eq!(some.to_string(), "shop.v1.Orders/Create, shop.v1.Orders/Get", "who names a harmless one wants it");
        assert_eq!(all.clone().restricted_to(["shop.v1.Orders/*"]).unwrap().paths().count(), 3);
        let wrong = |name: &str| all.clone().restricted_to([name]).unwrap_err().to_string();
        assert_eq!(
            wrong("shop.v1.Orders/Watch"),
            "\"shop.v1.Orders/Watch\" is a streaming method; only unary ones are covered"
        );
        assert_eq!(wrong("shop.v1.Orders/Creat"), "\"shop.v1.Orders/Creat\" is not known");
        assert_eq!(wrong("shop.Orders/*"), "\"shop.Orders\" has no unary method that is known");
        assert!(wrong("Create").contains("is no gRPC method"));
    }

    #[test]
    fn what_is_no_descriptor_set_is_told_so() {
        let bytes = compiled(&[("shop.proto", SHOP)]);
        for cut in 1..bytes.len() {
            assert!(UnaryMethods::from_descriptor_set(&bytes[..cut]).is_err(), "{cut}");
        }
        assert_eq!(UnaryMethods::from_descriptor_set(b"").unwrap_err(), DescriptorError::NoService);
        assert_eq!(UnaryMethods::from_descriptor_set(SHOP.as_bytes()).unwrap_err(), DescriptorError::Malformed);
        let none = compiled(&[("m.proto", "syntax = \"proto3\"; message M {}")]);
        assert_eq!(UnaryMethods::from_descriptor_set(&none).unwrap_err(), DescriptorError::NoService);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, at: usize, byte: u8) {
            let _ = UnaryMethods::from_descriptor_set(&bytes);
            let mut near = compiled(&[("shop.proto", "syntax = \"proto3\"; message M {} service S { rpc D(M) returns (M); }")]);
            let at = at % near.len();
            near[at] = byte;
            let _ = UnaryMethods::from_descriptor_set(&near);
        }
    }

    #[test]
    fn names_may_start_with_a_slash_and_nothing_else() {
        assert!(UnaryMethods::methods(["/a.B/C", "d.E/F"]).contains("/d.E/F"));
        for wrong in ["", "a.B", "a.B/", "/C", "a.B/C/D", "a..B/C", "a.B/C ", "a.B/*", "//a.B/C", "1.B/C"] {
            assert!(method_path(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    #[should_panic(expected = "\"shop.Orders.Create\" is no gRPC method")]
    fn a_name_that_could_never_match_is_a_panic() {
        let _ = UnaryMethods::methods(["shop.Orders.Create"]);
    }
}
