//! The history of all calls of a simulation, and the check that it keeps the promises of
//! `docs/semantics.md`.
