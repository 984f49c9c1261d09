//! Files as shards.
