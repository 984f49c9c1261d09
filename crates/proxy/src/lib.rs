//! `ProxyStore`: an [`ObjectStore`](store::ObjectStore) on the DPU whose drives are on the host.
//!
//! The osd's process opens an [`Attachment`] to the store's process and gets one [`ProxyStore`] per
//! target. Calls that carry data use the rings and the data region of the [`channel`]. All other
//! calls use its control socket. A table in `docs/channel.md` lists the calls. On the host, a
//! [`Server`] takes the calls in order and executes them on the real stores.
//!
//! If the store's process dies, the attachment opens a new store channel when the store returns.
//! This crate decides which calls may be repeated. The crate `channel` moves the bytes. Neither
//! crate interprets the data of objects.

#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod admission;
mod attachment;
mod calls;
#[doc(hidden)]
pub mod fuzz;
mod messages;
mod options;
mod poller;
mod proof;
mod proxy_store;
mod proxy_store_set;
mod server;
mod shared;
mod store_channel;
mod supervise;
mod transaction_codec;

pub use attachment::{Attachment, AttachmentStatus};
pub use options::{AttachmentOptions, DmaTuning, StoreEndpoint};
pub use proxy_store::ProxyStore;
pub use proxy_store_set::ProxyStoreSet;
pub use server::{LocalServer, MAX_LOOPS, ServedTarget, Server, ServerOptions, ServerStatus, StoreListener};
