//! Connects a command to its node, and parses names of pools and objects from the command line.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::thread::{self, ThreadClass};
use client::engine::{ControlEngine, MemEngine};
use client::{Client, Object, Options, Pool};
use vdisk::OpenSession;

use crate::args::NodeArgs;
use crate::commands::locate;
use crate::output;
use node::failure::{Doing, Failure, Result};

/// Maximum time that a command tries to reach a node that it finds by its directory. The supervisor
/// needs less time to restart an osd.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum time that a command tries to reach an address from --endpoint. This time is shorter,
/// because the address may be wrong.
const ENDPOINT_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time of a request of the owner of a disk: requests on a disk wait until the node is back.
const OWNER_PATIENCE: Duration = Duration::from_secs(3600);
/// Maximum time that [`answers`] waits for a connection, and for an answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
/// Time without a connection after which a command prints why it waits.
const SILENCE: Duration = Duration::from_secs(2);
/// Prefix of an endpoint that names a file of the reference engine instead of a node. Tests of the
/// object commands use it.
const MEM_ENDPOINT: &str = "mem:";
/// Pause after the first failed attempt to connect. The pause doubles after each further attempt.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Maximum pause between two attempts to connect.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Connects to the node and runs `body` on a separate thread. CPU accounting recognises the client
/// by the name of this thread.
///
/// # Errors
/// The node cannot be found or reached, or `body` fails.
pub fn run<T, F>(
    node: &NodeArgs,
    options: Options,
    body: impl FnOnce(Client) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    let node = node.clone();
    on_client_thread(move || run_here(&node, options, body))
}

fn on_client_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let thread = thread::spawn(ThreadClass::Client, "0", work).doing("starting the client")?;
    thread
        .join()
        .unwrap_or_else(|_| Err(Failure::new("running the client", "the client panicked; this is a bug")))
}

/// Like [`run`], for a command that attaches disks. `body` also gets a way to open the exclusive
/// sessions of disks.
///
/// # Errors
/// As for [`run`].
pub fn run_as_owner<T, F>(
    node: &NodeArgs,
    options: Options,
    body: impl FnOnce(Client, OpenSession) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    let node = node.clone();
    on_client_thread(move || {
        let endpoint = locate::endpoint(&node)?;
        // All sessions share the engine: another one would wait for the lock of the file.
        let memory = match endpoint.strip_prefix(MEM_ENDPOINT) {
            Some(file) => Some(Arc::new(MemEngine::open(file).doing(format!("opening {endpoint}"))?)),
            None => None,
        };
        let sessions = OnceCell::new();
        let connect_both = async |node: &NodeArgs, options: &Options| {
            sessions.get_or_init(|| exclusive_sessions(node, options, memory.clone()));
            match &memory {
                Some(engine) => Ok(Client::over(Arc::clone(engine) as _, options.clone())),
                None => connect(node, options).await,
            }
        };
        run_connected(&node, options, connect_both, |client| {
            body(client, sessions.get().cloned().expect("connecting has prepared the sessions"))
        })
    })
}

/// Returns a way to open exclusive sessions. `options` say how the command connects to the node.
fn exclusive_sessions(node: &NodeArgs, options: &Options, memory: Option<Arc<MemEngine>>) -> OpenSession {
    let node = node.clone();
    let options = Options { exclusive: true, request_timeout: OWNER_PATIENCE, ..options.clone() };
    Arc::new(move || {
        let (node, options, memory) = (node.clone(), options.clone(), memory.clone());
        Box::pin(async move {
            if let Some(engine) = memory {
                return Ok(Client::over(Arc::new(engine.sibling()), options));
            }
            let endpoint = locate::endpoint(&node).map_err(|e| client::Error::Argument(e.to_string()))?;
            Client::connect(&endpoint, options).await
        })
    })
}

/// Like [`run`], on the calling thread.
///
/// # Errors
/// As for [`run`].
pub fn run_here<T, F>(node: &NodeArgs, options: Options, body: impl FnOnce(Client) -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    run_connected(node, options, connect, body)
}

/// Like [`run`], for a command that only administers the node. If the node has recorded the address of
/// its control plane in its directory, the command opens no session on the data path. Otherwise, the node
/// tells the address when the session opens.
pub fn administer<T, F>(node: &NodeArgs, body: impl FnOnce(Client) -> F + Send + 'static) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    avoid_huge_pages();
    let node = node.clone();
    on_client_thread(move || run_connected(&node, super::options(), connect_control, body))
}

fn run_connected<T, F>(
    node: &NodeArgs,
    mut options: Options,
    connect: impl AsyncFnOnce(&NodeArgs, &Options) -> Result<Client>,
    body: impl FnOnce(Client) -> F,
) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    // Fail at once if the node is down; only an osd that restarts is worth waiting for.
    if !locate::endpoint(node)?.starts_with(MEM_ENDPOINT) {
        options = locate::connecting(node, options)?;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().doing("starting the client")?;
    let result = runtime.block_on(async {
        let client = connect(node, &options).await?;
        let result = body(client.clone()).await;
        client.close().await;
        result
    });
    // Do not wait for a blocked read of standard input, because its result is no longer needed.
    runtime.shutdown_background();
    result
}

/// Returns whether the osd of the node in a directory answers, without waiting for its restart.
pub fn answers(node: &NodeArgs) -> bool {
    let options =
        Options { connect_timeout: ANSWER_PATIENCE, request_timeout: ANSWER_PATIENCE, ..super::options() };
    let Ok(options) = locate::connecting(node, options) else { return false };
    let Ok(endpoint) = locate::endpoint(node) else { return false };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return false;
    };
    let asked = async {
        let client = Client::connect(&endpoint, options).await?;
        let answer = client.pools().await;
        client.close().await;
        answer
    };
    runtime
        .block_on(async { tokio::time::timeout(2 * ANSWER_PATIENCE, asked).await })
        .is_ok_and(|answer| answer.is_ok())
}

/// Like [`run`], for commands that usually need little memory. The process gets no transparent huge
/// pages until [`allow_huge_pages`]. Clearing them would cost a small request more CPU time than all
/// its other work.
pub fn run_small<T, F>(
    node: &NodeArgs,
    options: Options,
    body: impl FnOnce(Client) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    avoid_huge_pages();
    run(node, options, body)
}

fn avoid_huge_pages() {
    // If the kernel refuses, the command only costs more CPU time.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

/// Ends the effect of [`run_small`], because the command moves much data. With huge pages, the
/// buffers of the data cause fewer page faults.
pub fn allow_huge_pages() {
    // If the kernel refuses, the command only costs more CPU time.
    let _ = rustix::thread::disable_transparent_huge_pages(false);
}

/// Connects to the node. While the node is up, the function waits for an osd that restarts.
async fn connect(node: &NodeArgs, options: &Options) -> Result<Client> {
    let began = Instant::now();
    let patience = if node.endpoint.is_some() { ENDPOINT_PATIENCE } else { PATIENCE };
    let mut pause = PAUSE_MIN;
    let mut said = false;
    loop {
        let endpoint = locate::endpoint(node)?;
        if let Some(file) = endpoint.strip_prefix(MEM_ENDPOINT) {
            let engine = MemEngine::open(file).doing(format!("opening {endpoint}"))?;
            return Ok(Client::over(Arc::new(engine), options.clone()));
        }
        let error = match Client::connect(&endpoint, options.clone()).await {
            Ok(client) => return Ok(client),
            Err(error) => error,
        };
        if !may_pass(&error) || began.elapsed() + pause > patience {
            return Err(error).doing(format!("connecting to {endpoint}"));
        }
        if !said && began.elapsed() > SILENCE {
            said = true;
            output::note(format!("{error}; retrying for up to {} s", patience.as_secs()));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Prepares a client that only administers the node.
async fn connect_control(node: &NodeArgs, options: &Options) -> Result<Client> {
    if locate::control(node).is_none() {
        return connect(node, options).await;
    }
    let node = node.clone();
    let engine = ControlEngine::new(options, move || locate::control(&node));
    Ok(Client::over(Arc::new(engine), options.clone()))
}

/// Returns true if the client may have failed to connect because the osd restarts.
fn may_pass(error: &client::Error) -> bool {
    use client::Error;
    use messenger::MessengerError;
    matches!(
        error,
        Error::TimedOut(_)
            | Error::Network(MessengerError::Unreachable { .. } | MessengerError::ConnectionLost(_))
    )
}

/// Opens a pool, or one namespace of a pool, written `POOL[:NAMESPACE]`.
pub fn pool(client: &Client, text: &str) -> Result<Pool> {
    let wrong = |e| Failure::usage(format!("reading the pool's name '{text}'"), e);
    match text.split_once(':') {
        None => client.pool(text).map_err(wrong),
        Some((name, namespace)) => client.pool(name).and_then(|p| p.namespace(namespace)).map_err(wrong),
    }
}

/// Opens an object, written `POOL[:NAMESPACE]/OBJECT`.
pub fn object(client: &Client, text: &str) -> Result<Object> {
    let Some((place, name)) = text.split_once('/') else {
        return Err(Failure::usage(
            format!("reading the object's name '{text}'"),
            "the name contains no '/'; write POOL/OBJECT or POOL:NAMESPACE/OBJECT",
        ));
    };
    let object = pool(client, place)?.object(name);
    object.map_err(|e| Failure::usage(format!("reading the object's name '{text}'"), e))
}
