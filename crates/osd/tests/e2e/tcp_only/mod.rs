//! Tests that are long and do not depend on the network.

mod coding;
mod compounds;
mod crash;
mod damage;
mod forget;
mod full;
mod recovery;
mod salvage;
mod salvage_damage;
mod stalls;
mod start;
mod times;
mod witness;
