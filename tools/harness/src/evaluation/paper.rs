//! Results of the paper *DoCeph: DPU-Offloaded Messaging in Ceph for Reduced Host CPU Utilization*
//! (SC Workshops '25, doi:10.1145/3731599.3767525). Each value names its section, figure or table.
//!
//! The paper's testbed (section 5.1, table 1) has two storage nodes with one osd each and a client,
//! AMD EPYC 9474F (48 cores), BlueField-3, Samsung PM893 and 100 Gbit/s Ethernet. `rados bench`
//! writes with 16 requests in flight; results are averages of five runs.

/// Title of the paper.
pub const TITLE: &str = "DoCeph: DPU-Offloaded Messaging in Ceph for Reduced Host CPU Utilization";
/// Digital object identifier of the paper.
pub const DOI: &str = "10.1145/3731599.3767525";

/// Figure 5, for writes of 4 MB on the baseline: network, the messenger's share of Ceph's CPU in %,
/// and Ceph's CPU in % of a core. The paper's text does not state the shares of ObjectStore and
/// osd.
pub const FIG5: [(&str, f64, f64); 2] = [("1 Gbit/s", 81.05, 24.0), ("100 Gbit/s", 82.48, 70.08)];

/// Table 2: context switches of messenger and ObjectStore. The paper does not name the network of
/// this run.
pub const TABLE2: (f64, f64) = (7475.0, 751.0);

/// Figure 7 (section 5.3): host CPU in % on the baseline, for the sizes in `PAPER_SIZES`.
pub const FIG7_BASELINE: [f64; 4] = [94.2, 70.1, 68.9, 67.2];
/// Figure 7: host CPU of DoCeph in %.
pub const FIG7_DOCEPH: [f64; 4] = [5.5, 5.75, 5.33, 5.39];
/// Section 5.3: host CPU that DoCeph saves, in %.
pub const SAVED: [f64; 4] = [94.2, 91.8, 91.9, 92.0];

/// Figure 8: mean latency on the baseline in s. The paper's text states only the values for 1 and
/// 16 MB.
pub const FIG8_BASELINE: [Option<f64>; 4] = [Some(0.03), None, None, Some(0.54)];
/// Figure 8 and table 3: mean latency of DoCeph in s.
pub const FIG8_DOCEPH: [f64; 4] = [0.05, 0.14, 0.30, 0.57];

/// Table 3, drawn in figure 9: the parts of DoCeph's latency, in s.
pub const TABLE3: [PaperBreakdown; 4] = [
    PaperBreakdown { host_write: 0.0008, dma: 0.0028, dma_wait: 0.0224, others: 0.024 },
    PaperBreakdown { host_write: 0.0024, dma: 0.0042, dma_wait: 0.0336, others: 0.0998 },
    PaperBreakdown { host_write: 0.0046, dma: 0.005_23, dma_wait: 0.0418, others: 0.248_37 },
    PaperBreakdown { host_write: 0.0084, dma: 0.008_46, dma_wait: 0.0676, others: 0.485_54 },
];

/// Time of a serial engine for one write, in µs: 2.4 ms plus 0.38 ms per 10^6 bytes, a linear fit
/// of table 3's row DMA. The profile bf3-paper uses this time for a write that is submitted in one
/// piece.
#[must_use]
pub fn dma_service_us(bytes: u64) -> f64 {
    2400.0 + 0.38e-3 * bytes as f64
}

/// Figure 10 (section 5.4): writes per second on the baseline.
pub const FIG10_BASELINE: [f64; 4] = [435.0, 119.0, 60.0, 28.0];
/// Figure 10: writes per second of DoCeph.
pub const FIG10_DOCEPH: [f64; 4] = [304.0, 112.0, 52.0, 27.0];

/// Returns all of the paper's values as JSON.
#[must_use]
pub fn json() -> serde_json::Value {
    serde_json::json!({
        "title": TITLE,
        "doi": DOI,
        "sizes_mb": [1, 4, 8, 16],
        "figure_5": FIG5.map(|(network, share, cpu)| {
            serde_json::json!({ "network": network, "messenger_percent": share, "cpu_percent_of_core": cpu })
        }),
        "table_2_context_switches": { "messenger": TABLE2.0, "object_store": TABLE2.1 },
        "figure_7_host_cpu_percent": { "baseline": FIG7_BASELINE, "doceph": FIG7_DOCEPH, "saved": SAVED },
        "figure_8_latency_s": { "baseline": FIG8_BASELINE, "doceph": FIG8_DOCEPH },
        "table_3_latency_s": TABLE3,
        "figure_10_iops": { "baseline": FIG10_BASELINE, "doceph": FIG10_DOCEPH },
    })
}

/// A column of table 3, in s.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct PaperBreakdown {
    /// Time of writing to BlueStore.
    pub host_write: f64,
    /// Time of the DMA transfers.
    pub dma: f64,
    /// Time of waiting for other transfers, because the engine is serial.
    pub dma_wait: f64,
    /// The remaining time.
    pub others: f64,
}

impl PaperBreakdown {
    /// Returns the sum of the parts. The paper rounds this sum to two decimal places.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.host_write + self.dma + self.dma_wait + self.others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_table_3_sum_up_to_its_totals() {
        for (column, total) in TABLE3.iter().zip(FIG8_DOCEPH) {
            assert!((column.total() - total).abs() < 0.005, "{} is not {total}", column.total());
        }
    }

    #[test]
    fn the_linear_fit_deviates_from_table_3_by_less_than_ten_percent() {
        for (column, size) in TABLE3.iter().zip(crate::evaluation::workload::PAPER_SIZES) {
            let relative = dma_service_us(size) / 1e6 / column.dma;
            assert!((0.9..1.1).contains(&relative), "{size}: {relative}");
        }
    }

    #[test]
    fn the_stated_cpu_savings_follow_from_the_values_of_figure_7() {
        for ((baseline, doceph), saved) in FIG7_BASELINE.iter().zip(FIG7_DOCEPH).zip(SAVED) {
            assert!((100.0 * (1.0 - doceph / baseline) - saved).abs() < 0.4);
        }
    }
}
