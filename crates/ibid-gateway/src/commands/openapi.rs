//! `ibid openapi SPEC --config FILE`: adds the gateway's behaviour to an OpenAPI document.

use std::io;

use http::Method;
use ibid_tools::{
    CommandError,
    openapi::{self, CoveringRoute},
};

pub use ibid_tools::openapi::OpenapiArgs;

use crate::{
    config::{Env, GatewaySettings, ServeArgs},
    routes::RouteTable,
};

pub fn run(
    args: &OpenapiArgs, env: &Env<'_>, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    let settings = GatewaySettings::load(&ServeArgs::for_file(&args.config), env)?;
    openapi::run(args, &find_route(&settings.routes), out, aside)
}

pub(crate) fn find_route<'a>(routes: &'a RouteTable) -> impl Fn(&Method, &str) -> Option<CoveringRoute<'a>> {
    move |method, path| {
        let route = routes.find(method, path)?;
        let (has_quota, is_default_policy) = (route.has_quota, route.is_default_policy);
        Some(CoveringRoute { policy: &route.policy, has_quota, is_default_policy })
    }
}
