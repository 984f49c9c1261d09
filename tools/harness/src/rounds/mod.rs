//! Measurements in rounds. Each round repeats all runs, so that the runs that are compared are close
//! to each other. `settings` reads the extent of the measurements, `book` stores the values by round,
//! `plot` draws line charts, and `quiet` checks whether other programs use the machine.

pub mod book;
pub mod plot;
pub mod quiet;
pub mod settings;
