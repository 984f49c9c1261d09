//! The role that serves front ends on virtual disks.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::clock::WallClock;
use base::thread::ThreadClass;
use client::engine::{NativeEngine, SharedConnections};
use client::{Client, Options};
use control::{ControlClient, GatewayOrders};
use gateway::{AttachmentFile, Gateway, GatewayConfig};
use identity::Credentials;
use vdisk::OpenSession;

use crate::announce::Ready;
use crate::failure::{Doing, Result};
use crate::role::{self, RoleArgs, RoleProcess, StopSignals};
use crate::state::Role;

/// Time for which a request of a disk waits for the node before the gateway repeats it.
const REQUEST_TIME: Duration = Duration::from_secs(3600);
/// Maximum number of requests of a disk in flight.
const REQUESTS: usize = 512;
/// Pause before another attempt to reach the node.
const PAUSE: Duration = Duration::from_millis(500);

/// What a gateway serves, and where.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// Address of the node.
    pub endpoint: String,
    /// Credential file of the gateway's user.
    pub credentials: PathBuf,
    /// Name of the gateway, which stays the same when it starts again.
    pub name: String,
    /// The holder's control socket; `None` if there is no holder.
    pub holder: Option<PathBuf>,
    /// File with the list of attachments.
    pub attachments: PathBuf,
}

/// Runs the role until a signal stops it.
///
/// # Errors
/// If the credentials or the list of attachments cannot be read.
pub fn run(args: &RoleArgs, options: GatewayOptions) -> Result<()> {
    role::run(Role::Gateway, args, |process| serve(process, options))
}

async fn serve(process: RoleProcess, wanted: GatewayOptions) -> Result<()> {
    let mut signals = StopSignals::catch()?;
    let credentials = Credentials::load(&wanted.credentials).doing("reading the gateway's credentials")?;
    let options = Options {
        trust: credentials.trust(),
        stack: process.config.network.stacks.clone(),
        request_timeout: REQUEST_TIME,
        requests_in_flight: REQUESTS,
        ..Options::default()
    };
    let connections = SharedConnections::open(&options).doing("preparing the network")?;
    let connecting = connect(&connections, &wanted.endpoint, &options);
    let engine = tokio::select! {
        engine = connecting => Arc::new(engine),
        () = signals.next() => return Ok(()),
    };
    let client = Client::over(Arc::clone(&engine) as _, options.clone());
    let control = ControlClient::new(options.trust.clone());
    let endpoint = wanted.endpoint.clone();
    let holder = wanted.holder.map(std::path::absolute).transpose();
    let holder = holder.doing("finding the holder's control socket")?;
    let open_session: OpenSession = Arc::new(move || {
        let (connections, endpoint) = (connections.clone(), endpoint.clone());
        let options = Options { exclusive: true, ..options.clone() };
        Box::pin(async move { Client::connect_sharing(&connections, &endpoint, options).await })
    });
    let gateway = Gateway::start(GatewayConfig {
        name: wanted.name.clone(),
        client,
        open_session,
        holder,
        attachments: AttachmentFile::at(&wanted.attachments),
        clock: WallClock::default(),
    });
    let gateway = gateway.doing("starting the gateway")?;
    role::ready(Ready { metrics: Some(process.metrics), ..Ready::default() });
    tokio::select! {
        () = signals.next() => {}
        never = serve_orders(&gateway, &engine, &control, &wanted.name) => match never {},
    }
    role::stopping();
    drop(gateway);
    Ok(())
}

/// Executes the orders of the node's control plane.
async fn serve_orders(
    gateway: &Gateway,
    engine: &NativeEngine,
    control: &ControlClient,
    name: &str,
) -> Infallible {
    loop {
        if let Ok(Some(endpoint)) = engine.control_endpoint() {
            match control.serve_gateway(&endpoint, name).await {
                Ok(orders) => execute(gateway, orders).await,
                Err(e) => tracing::warn!(error = %e, "cannot reach the control plane yet"),
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Executes orders until the connection to the control plane ends.
async fn execute(gateway: &Gateway, mut orders: GatewayOrders) {
    tracing::info!("the gateway receives orders");
    loop {
        match orders.next().await {
            Ok((id, request)) => {
                let (gateway, answers) = (gateway.clone(), orders.answers());
                base::task::spawn_local(ThreadClass::Client, async move {
                    answers.done(id, gateway.execute(request).await).await;
                });
            }
            Err(e) => return tracing::warn!(error = %e, "the gateway receives no orders any more"),
        }
    }
}

/// Connects to the node. Waits until the node accepts the connection.
async fn connect(connections: &SharedConnections, endpoint: &str, options: &Options) -> NativeEngine {
    loop {
        match NativeEngine::connect_sharing(connections, endpoint, options).await {
            Ok(engine) => return engine,
            Err(e) => tracing::warn!(endpoint, error = %e, "cannot reach the node yet"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}
