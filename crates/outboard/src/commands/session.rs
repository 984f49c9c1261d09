//! A session with the node that a command was told of, and names as users write them.

use base::thread::{self, ThreadClass};
use client::{Client, Object, Options, Pool};

use crate::cli::NodeArgs;
use crate::failure::{Doing, Failure, Result};
use crate::node::locate;

/// Connects to the node and runs `body`, on a thread of its own whose name shows the client's share of the CPU.
///
/// # Errors
/// The node cannot be found or reached, or whatever `body` fails with.
pub fn run<T, F>(
    node: &NodeArgs,
    mut options: Options,
    body: impl FnOnce(Client) -> F + Send + 'static,
) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>>,
{
    let endpoint = locate::endpoint(node)?;
    options.stack = node.network.clone();
    options.source = node.bind;
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .doing("starting the client")?;
        let result = runtime.block_on(async {
            let client =
                Client::connect(&endpoint, options).await.doing(format!("connecting to {endpoint}"))?;
            let result = body(client.clone()).await;
            client.close().await;
            result
        });
        // A read of standard input may still be waiting; nobody needs it any more.
        runtime.shutdown_background();
        result
    };
    let thread = thread::spawn(ThreadClass::Client, "0", work).doing("starting the client")?;
    thread.join().unwrap_or_else(|_| Err(Failure::new("running the client", "it panicked; this is a bug")))
}

/// A pool, or a namespace of it, written `POOL[:NAMESPACE]`.
pub fn pool(client: &Client, text: &str) -> Result<Pool> {
    let wrong = |e| Failure::usage(format!("reading the pool's name '{text}'"), e);
    match text.split_once(':') {
        None => client.pool(text).map_err(wrong),
        Some((name, namespace)) => client.pool(name).and_then(|p| p.namespace(namespace)).map_err(wrong),
    }
}

/// An object, written `POOL[:NAMESPACE]/OBJECT`.
pub fn object(client: &Client, text: &str) -> Result<Object> {
    let Some((place, name)) = text.split_once('/') else {
        return Err(Failure::usage(
            format!("reading the object's name '{text}'"),
            "there is no '/' in it; write POOL/OBJECT or POOL:NAMESPACE/OBJECT",
        ));
    };
    let object = pool(client, place)?.object(name);
    object.map_err(|e| Failure::usage(format!("reading the object's name '{text}'"), e))
}
