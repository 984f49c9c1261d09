//! `ProxyStore`: an [`ObjectStore`](store::ObjectStore) on the DPU whose drives are on the host.
//!
//! The osd's process opens an [`Attachment`] to the store's process and gets one [`ProxyStore`] per target. Calls that
//! carry data go through the rings and the data region of the [`channel`]; the rest goes through its control socket
//! (`docs/channel.md` has the table). On the other side a [`Server`] takes the calls in order and makes them on the real
//! stores. If the store's process dies, the attachment opens another link by itself; this crate decides which calls may be
//! repeated. It does not move bytes (crate `channel` does) and does not look into objects.

#![forbid(unsafe_code)]

mod admission;
mod attachment;
mod calls;
#[doc(hidden)]
pub mod fuzz;
mod link;
mod messages;
mod options;
mod poller;
mod proxy_store;
mod proxy_stripes;
mod server;
mod shared;
mod supervise;
mod transaction_codec;

pub use attachment::{Attachment, AttachmentStatus, Offload};
pub use options::{AttachmentOptions, DmaTuning, StoreEndpoint};
pub use proxy_store::ProxyStore;
pub use proxy_stripes::ProxyStripes;
pub use server::{ServedTarget, Server, ServerOptions, ServerStatus, StoreListener};
