//! Several targets as one store: each object has data on all of them, so that some targets may be
//! lost.
//!
//! A placement group of a pool with redundancy has one [`Array`]: a store of one collection over
//! the stores of the group's members, with one fragment of each object on each. Its user sees a
//! store like any other, whose incarnation changes when a member fails or comes back. The modules,
//! from the top down:
//!
//! - `array`: takes requests and starts their tasks.
//! - `transact`: makes one transaction for each member. `work` collects what a transaction does to
//!   one object. `staging` writes large data before its transaction.
//! - `rebuild` brings members back in sync, `scrub` compares members, `repair` makes a damaged
//!   fragment anew. `rebuild` and `repair` use `copy`, which copies an object to a member.
//! - `read`: reads and verifies. `plan` chooses the fragments that are read where one is lost.
//!   `ask`: questions that any member can answer.
//! - `open`: begins an interval. `view` reads what a target stores of the group, `members` finds
//!   the members in sync, `undo` takes back transactions that only some members have, `removal`
//!   deletes what former members still store. `create` makes a group.
//! - `group`: the state of a group. `interval`: a period in which the same members take part.
//!   `intents`: transactions under way. `terms`: numbers of the group's records. `rebuilding`: a
//!   member on its way back. `objects`: the lock and the size of each object. `stage`: staged data.
//!   `damaged`: fragments to repair. `calls`: how long the group waits for a member.
//! - `overlay` computes the change of an object, `rows` which rows of its stripes change, `split`
//!   and `parity` the changes of its fragments. `layout` and `coder` say which fragment has which
//!   bytes, and compute parity. `coding`: where parity is computed.
//! - `member`: what a group must know of a target. `member_link`: a member in one incarnation of
//!   its store. `record`: what each member stores for the group. `pace`: how fast background work
//!   goes.
//!
//! **What it rests on.** A transaction carries a number, and its intent, on every member. It is
//! acknowledged once every member in sync has committed it. A transaction that only some members
//! have is taken back, with the data that those have kept. The record of a group names the members
//! in sync. It has a term, and is on every member in sync before anything is acknowledged without
//! the others. An object is changed by one transaction at a time. The omap entries that several
//! transactions may change at a time (of a placement group's own object) are either written by one
//! transaction alone or only ever grow. See `docs/adr/0012`.
//!
//! **Threads.** An [`Array`] and its group live on one thread, in a `LocalSet`. A request begins in
//! the call of [`submit`](store::Submit::submit). The rest of a request runs in a task, whether or
//! not its future is polled.

#![forbid(unsafe_code)]

mod array;
#[cfg(test)]
mod array_test;
mod ask;
mod calls;
mod coder;
mod coding;
mod copy;
mod create;
mod damaged;
mod group;
mod intents;
mod interval;
mod layout;
mod member;
mod member_link;
mod members;
mod objects;
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
mod record;
mod removal;
mod repair;
mod rows;
mod scrub;
mod split;
mod stage;
mod staging;
mod task;
mod terms;
mod transact;
mod undo;
mod view;
mod work;

pub use array::{Array, ArrayFuture};
pub use coding::{CodingConfig, CodingDispatcher, StripesAt};
pub use group::{Group, GroupOptions};
pub use interval::Interval;
pub use member::Member;
pub use pace::Pace;
pub use probe::NewObjects;
pub use rebuild::{RETRY, Rebuilt};
pub use record::SIZE_XATTR;
pub use scrub::Findings;
