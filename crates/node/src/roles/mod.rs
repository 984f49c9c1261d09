//! The bodies of the roles, one file per command that runs a role. A body assembles the role from
//! the crates that do its work, serves until a signal stops the process, and then unmounts the
//! targets. The commands of crate `outboard` call this module.

pub mod gateway;
pub mod holder;
pub mod osd;
pub mod store;
