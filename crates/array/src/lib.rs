//! Stores a placement group's objects redundantly on several targets, so that the group survives
//! the loss of some targets.
//!
//! Each placement group of a redundant pool has one [`Array`]. An array is an object store with a
//! single collection. It keeps one fragment of each object in the store of each member of the
//! group. Callers use an array like any other store. The incarnation of an array changes when a
//! member fails or returns. The modules, from the top down:
//!
//! - `array`: accepts requests and starts their tasks.
//! - `transact`: splits a transaction into one transaction per member. `work` collects the changes
//!   that a transaction makes to one object. `staging` writes large data before its transaction.
//! - `salvage` continues with stale members after an operator has accepted a loss (`word`), and
//!   `salvage_object` makes them agree about one object. `empty` begins without objects if nothing is
//!   left.
//! - `rebuild` brings members back in sync, `scrub` compares the fragments of all members, `repair`
//!   replaces a damaged fragment. `rebuild`, `repair` and `salvage_object` use `copy`, which copies
//!   an object to a member.
//! - `read`: reads and verifies data. `plan` chooses which fragments to read if a fragment is
//!   missing. `extents` finds the ranges that have blocks. `ask` sends metadata queries that any
//!   member can answer.
//! - `open`: begins an interval. `view` reads what a target stores about the group, `members` finds
//!   the members in sync, `undo` rolls back transactions that only some members have, `removal`
//!   deletes the data of former members. `create` creates a group.
//! - `group`: the state of a group. `interval`: a period in which the same members take part in
//!   transactions. `objects`: the order of the requests on each object, and its size. `intents`:
//!   transactions in progress, with their numbers (`sequence`), the undo objects of earlier ones
//!   (`slots`) and the dirty notes (`dirty`); `answers`: the outcome of one transaction. `terms`: the
//!   numbers (*terms*) of the membership records. `rebuilding`: a member that is being rebuilt.
//!   `receivers`: targets that could not receive objects. `obstacle`: why no interval can begin.
//!   `stage`: staged data. `damaged`: fragments to repair. `damaged_changes`: changes that
//!   cannot be copied to a member. `calls`: calls on members and timeouts.
//! - `overlay` computes the change of an object, `rows` the affected rows of its stripes, `split`
//!   and `parity` the changes of its fragments. `layout` maps bytes to fragments. `coder` computes
//!   parity. `coding` chooses where parity is computed.
//! - `member`: the interface of a target as a group sees it. `member_link`: a member, together with
//!   the incarnation of its store. `record`: the records that each member stores for the group.
//!   `pace`: limits the speed of background work.
//!
//! **Consistency.** Each transaction has a number. Every member stores the transaction's intent, with
//! this number: a record of what the transaction changes, and of how to undo it. The array
//! acknowledges a transaction after every member in sync has committed it. If only some members
//! have committed a transaction, the array rolls it back: the members that have committed it
//! restore the old data from their undo objects, which are copies of the overwritten data. The
//! membership record names the members in sync, and has a term. Before the array continues without
//! a member, all remaining members in sync store a new record. The new record no longer lists the
//! missing member as in sync. A transaction with a guard on an object may be queued while earlier
//! transactions on the object are in progress: the members refuse it if one of these fails. A
//! transaction without a guard waits for them. The metadata objects of the array's owner (the osd)
//! are an exception: several transactions may change their omap entries concurrently. Each of these
//! entries is either written by a single transaction, or has a value that only grows. See
//! `docs/adr/0012`, `docs/adr/0022` and `docs/adr/0023`.
//!
//! **Threads.** An [`Array`] and its group live on one thread, in a `LocalSet`. A request starts
//! during the call of [`submit`](store::Submit::submit). The rest of the request runs in its own
//! task, whether or not the caller polls the returned future.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod answers;
mod array;
#[cfg(test)]
mod array_test;
mod ask;
mod calls;
mod catch_up;
mod coder;
mod coding;
mod copy;
mod create;
mod damaged;
mod damaged_changes;
mod decision;
#[cfg(test)]
mod decision_model_test;
#[cfg(test)]
mod decision_test;
mod dirty;
mod empty;
mod extents;
mod group;
mod intents;
mod interval;
mod layout;
mod member;
mod member_link;
mod members;
mod objects;
mod obstacle;
mod open;
mod overlay;
mod pace;
mod page;
mod parity;
mod plan;
mod probe;
mod read;
mod rebuild;
mod rebuilding;
mod receivers;
mod record;
mod removal;
mod repair;
mod rows;
mod salvage;
mod salvage_object;
mod scrub;
mod sequence;
mod slots;
mod split;
mod stage;
mod staging;
mod task;
mod terms;
mod transact;
mod undo;
mod view;
mod witness;
mod word;
mod work;

pub use array::{Array, ArrayFuture};
pub use coding::{CodingConfig, CodingDispatcher, StripesAt, Thresholds};
pub use group::{Group, GroupOptions};
pub use interval::Interval;
pub use member::Member;
pub use pace::Pace;
pub use probe::NewObjects;
pub use rebuild::{RETRY, Rebuilt};
pub use record::{SIZE_XATTR, UNFINISHED_XATTR};
pub use scrub::Findings;
pub use witness::{Witness, WitnessEntry};
