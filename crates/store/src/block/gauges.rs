//! [`SpaceGauges`]: metrics of a target's space.

use metrics::Gauge;
use uuid::Uuid;

use super::usage::IndexSpace;

/// Metrics of the index, the log and the cache of a target, in bytes.
pub(crate) struct SpaceGauges {
    index_used: Gauge,
    index_size: Gauge,
    log_used: Gauge,
    log_size: Gauge,
    cache_used: Gauge,
    cache_limit: Gauge,
}

impl std::fmt::Debug for SpaceGauges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SpaceGauges").finish_non_exhaustive()
    }
}

impl SpaceGauges {
    /// The metrics of the target with this UUID.
    pub(crate) fn new(target: Uuid) -> SpaceGauges {
        let of = |name: &'static str| metrics::gauge!(name, "target" => target.to_string());
        SpaceGauges {
            index_used: of("outboard_store_index_used_bytes"),
            index_size: of("outboard_store_index_bytes"),
            log_used: of("outboard_store_log_used_bytes"),
            log_size: of("outboard_store_log_bytes"),
            cache_used: of("outboard_store_cache_used_bytes"),
            cache_limit: of("outboard_store_cache_limit_bytes"),
        }
    }

    /// Updates all metrics. `log` is the used part and the size of the log, and `cache` the used part
    /// and the limit of the caches, in bytes.
    pub(crate) fn set(&self, index: IndexSpace, log: (u64, u64), cache: (usize, usize)) {
        self.index_used.set((index.total - index.free) as f64);
        self.index_size.set(index.total as f64);
        self.log_used.set(log.0 as f64);
        self.log_size.set(log.1 as f64);
        self.cache_used.set(cache.0 as f64);
        self.cache_limit.set(cache.1 as f64);
    }
}
