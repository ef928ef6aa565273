//! The manifests: valid by Kubernetes' own schemas, and the gateway in them starts, is probed where it listens, and is given
//! the time that it takes to stop.

use std::{fs, time::Duration};

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};
use serde_json::Value;
use testbed::process;

use super::common::{BIN, at, installed, root, run, text, yaml};

const MANIFESTS: [&str; 4] = [
    "deploy/kubernetes/shared-gateway.yaml",
    "deploy/kubernetes/sidecar.yaml",
    "deploy/kubernetes/ext-proc.yaml",
    SIDECAR_API,
];
const SIDECAR_API: &str = "deploy/kubernetes/sidecar-api.yaml";
/// The oldest that they are for, and one of the newest.
const VERSIONS: [&str; 2] = ["1.31", "1.37"];
/// What the Secret holds.
const STORES: [&str; 4] = [
    "postgres://gateway:s3cret@postgres:5432/ibid",
    "redis://:s3cret@redis:6379/0",
    "postgres://gateway:s3cret@postgres:5432/ibid",
    "redis://:s3cret@redis:6379/0",
];

fn of_kind<'a>(manifests: &'a [Value], kind: &str) -> Vec<&'a Value> {
    manifests.iter().filter(|manifest| manifest["kind"] == kind).collect()
}

fn config(manifests: &[Value]) -> &str {
    let [config] = of_kind(manifests, "ConfigMap")[..] else { panic!("one ConfigMap") };
    at(config, "/data/ibid.toml")
}

/// The gateway's container, and the pod that it is in.
fn gateway(manifests: &[Value]) -> (&Value, &Value) {
    let [deployment] = of_kind(manifests, "Deployment")[..] else { panic!("one Deployment") };
    let pod = &deployment["spec"]["template"]["spec"];
    let containers = ["containers", "initContainers"].into_iter().filter_map(|kind| pod[kind].as_array()).flatten();
    (containers.into_iter().find(|container| container["name"] == "ibid").expect("a gateway"), pod)
}

/// Whether a container starts before those of the app, and stops after them.
fn is_sidecar_container(container: &Value) -> bool {
    container["restartPolicy"] == "Always"
}

#[test]
fn the_manifests_fit_the_schemas() {
    for version in VERSIONS {
        for path in MANIFESTS {
            let mut validate = installed("kubernetes-validate");
            let (fine, told) = run(validate.args(["--strict", "-k", version]).arg(root().join(path)));
            assert!(fine, "{path}, {version}: {told}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.yaml");
    fs::write(&wrong, fs::read_to_string(root().join(MANIFESTS[0])).unwrap().replace("readinessProbe", "readyProbe"))
        .unwrap();
    let (fine, _) = run(installed("kubernetes-validate").args(["--strict", "-k", VERSIONS[0]]).arg(&wrong));
    assert!(!fine, "the schemas find what is wrong");
}

/// With exactly the variables that the container is given.
#[tokio::test]
async fn the_configuration_in_them_loads() {
    for (path, store) in MANIFESTS.into_iter().zip(STORES) {
        let manifests = yaml(path);
        let (container, _) = gateway(&manifests);
        let env: Vec<_> = container["env"].as_array().expect("variables").iter().map(|env| at(env, "/name")).collect();
        let values: Vec<_> =
            env.iter().map(|name| (*name, if *name == "IBID_STORE_URL" { store } else { "s3cret" })).collect();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ibid.toml");
        fs::write(&file, config(&manifests)).unwrap();
        let output = process::run(BIN, &["check", file.to_str().unwrap()], &values).await;
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{path}: {printed}{}", String::from_utf8_lossy(&output.stderr));
        assert!(printed.contains("valid") && !printed.contains("s3cret"), "{path}: {printed}");
        assert!(printed.contains(if store.starts_with("redis") { "redis://" } else { "postgres://" }), "{printed}");
    }
}

#[test]
fn the_gateway_is_probed_where_it_listens_and_has_time_to_stop() {
    for (path, store) in MANIFESTS.into_iter().zip(STORES) {
        let manifests = yaml(path);
        let variables = [("IBID_STORE_URL", store), ("IBID_ADMIN_TOKEN", "s3cret")];
        let settings =
            GatewaySettings::from_text(config(&manifests), None, &ServeArgs::default(), &Env::from_pairs(&variables));
        let settings = settings.unwrap_or_else(|why| panic!("{path}: {why}"));
        let (container, pod) = gateway(&manifests);

        let port = |name: &str| {
            let ports = container["ports"].as_array().expect("ports");
            ports.iter().find(|port| port["name"] == name).expect(name)["containerPort"].as_u64().expect("a number")
        };
        let admin = settings.admin.expect("an admin port").listen;
        let reached = [("http", settings.listen), ("admin", admin)];
        for (name, listen) in reached.into_iter().filter(|(name, _)| *name == "admin" || settings.api.is_none()) {
            assert_eq!(port(name), u64::from(listen.port()), "{path}: {name}");
            assert!(listen.ip().is_unspecified(), "{path}: who comes from another address reaches {name}");
        }
        for (probe, asked) in
            [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
        {
            assert_eq!(at(container, &format!("/{probe}/httpGet/path")), asked, "{path}");
            assert_eq!(at(container, &format!("/{probe}/httpGet/port")), "admin", "{path}");
        }

        let seconds = |value: &Value, pointer: &str| {
            Duration::from_secs(
                value.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {pointer}")),
            )
        };
        let grace = seconds(pod, "/terminationGracePeriodSeconds");
        let pause = match is_sidecar_container(container) {
            // They stop one after the other.
            true => seconds(pod, "/containers/0/lifecycle/preStop/sleep/seconds") + settings.limits.shutdown,
            false => seconds(container, "/lifecycle/preStop/sleep/seconds"),
        };
        assert!(grace > pause + settings.limits.shutdown, "{path}");
        let others = pod["containers"].as_array().unwrap().iter().filter(|other| other["name"] != "ibid");
        for other in others.filter(|_| !is_sidecar_container(container)) {
            let stays = seconds(other, "/lifecycle/preStop/sleep/seconds");
            assert!(stays > pause + settings.limits.shutdown && stays < grace, "{path}: the app outlives the gateway");
        }
        let journal = settings.journal.expect("a journal");
        let mounts = container["volumeMounts"].as_array().expect("volumes");
        let writable = mounts.iter().filter(|mount| mount["readOnly"] != true).map(|mount| at(mount, "/mountPath"));
        assert!(writable.into_iter().any(|mount| journal.starts_with(mount)), "{path}: the journal can be written");
    }
}

/// As the same user: ibid closes connections of others.
#[test]
fn the_app_reaches_the_exchange_api_on_a_socket_that_both_containers_mount() {
    let manifests = yaml(SIDECAR_API);
    let variables = [("IBID_STORE_URL", STORES[3]), ("IBID_ADMIN_TOKEN", "s3cret")];
    let settings =
        GatewaySettings::from_text(config(&manifests), None, &ServeArgs::default(), &Env::from_pairs(&variables));
    let listen = settings.unwrap_or_else(|why| panic!("{why}")).api.expect("an API").listen.to_string();
    let (ibid, pod) = gateway(&manifests);
    let app = &pod["containers"][0];
    let variables = app["env"].as_array().expect("variables");
    assert!(variables.iter().any(|variable| variable["name"] == "IBID_API" && variable["value"] == listen), "{app}");
    let socket = listen.strip_prefix("unix:").expect("a socket");
    let volume = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().expect("volumes");
        let mount = mounts.iter().find(|mount| socket.starts_with(at(mount, "/mountPath"))).expect("a folder for it");
        mount["name"].clone()
    };
    assert_eq!(volume(app), volume(ibid));
    let volumes = pod["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().any(|shared| shared["name"] == volume(ibid) && shared["emptyDir"].is_object()));
    for container in [app, ibid] {
        assert!(container["securityContext"]["runAsUser"].is_null() && pod["securityContext"]["runAsUser"].is_u64());
    }
}

/// Istio and the documentation have the filter that the tests run with Envoy.
#[test]
fn istio_has_envoys_filter() {
    let envoy = yaml("deploy/envoy/envoy.yaml");
    let filters = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0/typed_config";
    let mut expected = envoy[0].pointer(filters).expect("the filter").clone();
    let istio = yaml("deploy/envoy/istio.yaml");
    let filter = istio[0].pointer("/spec/configPatches/0/patch/value/typed_config").expect("the filter");
    expected["grpc_service"] = filter["grpc_service"].clone();
    assert_eq!(*filter, expected);
    let (file, page) = (text("deploy/envoy/envoy.yaml"), text("docs/envoy.md"));
    let lines = file.lines().map(str::trim).skip_while(|line| *line != "- name: envoy.filters.http.ext_proc");
    let lines: Vec<_> = lines.take_while(|line| *line != "- name: envoy.filters.http.router").collect();
    assert!(lines.len() > 7, "{lines:?}");
    for line in lines {
        assert!(page.contains(line.trim_start_matches("- ")), "docs/envoy.md has no {line:?}");
    }
}

#[test]
fn nobody_is_root_and_secrets_are_not_in_them() {
    for path in MANIFESTS {
        let manifests = yaml(path);
        let (container, pod) = gateway(&manifests);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{path}");
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "{path}");
        assert_eq!(container["securityContext"]["capabilities"]["drop"][0], "ALL", "{path}");
        assert!(container["resources"]["limits"]["memory"].is_string(), "{path}");
        for env in container["env"].as_array().expect("variables") {
            assert!(env["valueFrom"]["secretKeyRef"]["name"].is_string(), "{path}: {env}");
        }
        assert_eq!(at(container, "/image"), format!("ibid:{}", env!("CARGO_PKG_VERSION")), "{path}");
        let replicas = of_kind(&manifests, "Deployment")[0]["spec"]["replicas"].as_u64().expect("replicas");
        let [budget] = of_kind(&manifests, "PodDisruptionBudget")[..] else { panic!("{path}: one budget") };
        assert!(budget["spec"]["minAvailable"].as_u64().expect("a number") < replicas, "{path}: a node can be drained");
        assert!(!of_kind(&manifests, "NetworkPolicy").is_empty(), "{path}");
        let labels = &of_kind(&manifests, "Deployment")[0]["spec"]["template"]["metadata"]["labels"];
        for kind in ["PodDisruptionBudget", "Deployment"] {
            assert_eq!(&of_kind(&manifests, kind)[0]["spec"]["selector"]["matchLabels"], labels, "{path}: {kind}");
        }
        assert_eq!(&of_kind(&manifests, "Service")[0]["spec"]["selector"], labels, "{path}");
        assert_eq!(&of_kind(&manifests, "NetworkPolicy")[0]["spec"]["podSelector"]["matchLabels"], labels, "{path}");
    }
}
