//! [`LayerStack`]: which layers of a disk, or of one of its snapshots, may have a chunk.

use bytes::Bytes;

use crate::header::{DiskHeader, DiskLayer};
use crate::names;

/// The layers that a view of a disk sees, newest first: those of the disk, or of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerStack {
    root: u64,
    layers: Vec<DiskLayer>,
}

impl LayerStack {
    /// Returns the layers of a disk.
    pub(crate) fn of_disk(header: &DiskHeader) -> LayerStack {
        LayerStack { root: header.root, layers: header.layers.clone() }
    }

    /// Returns the layers of a snapshot, from its newest layer on.
    pub(crate) fn of_snapshot(header: &DiskHeader, layer: u64) -> LayerStack {
        let layers = header.layers.iter().copied().skip_while(|one| one.id != layer).collect();
        LayerStack { root: header.root, layers }
    }

    /// Returns the name of a chunk's object in the newest layer.
    pub(crate) fn top(&self, index: u64) -> String {
        names::chunk(self.layers[0].id, self.root, index)
    }

    /// Returns whether older layers are visible for a chunk.
    pub(crate) fn has_older(&self, index: u64) -> bool {
        self.layers.len() > 1 && index < self.layers[0].visible_below
    }

    /// Returns the names of a chunk's objects in the older layers, newest first.
    pub(crate) fn older(&self, index: u64) -> Vec<Bytes> {
        let is_seen = |pair: &[DiskLayer]| index < pair[0].visible_below;
        let seen = self.layers.windows(2).take_while(|pair| is_seen(pair)).map(|pair| pair[1].id);
        seen.map(|layer| names::chunk(layer, self.root, index).into()).collect()
    }

    /// Returns the newest layer.
    pub(crate) fn top_layer(&self) -> DiskLayer {
        self.layers[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::tests::example;

    #[test]
    fn a_view_sees_older_layers_up_to_the_smallest_size_since_then() {
        let mut header = example();
        header.layers[0].visible_below = 3;
        header.add_snapshot("a", 5, 0).unwrap();
        header.add_snapshot("b", 6, 0).unwrap();
        header.layers.push(DiskLayer { id: 1, visible_below: u64::MAX, is_own: false });
        header.layers[1].visible_below = 10;
        let disk = LayerStack::of_disk(&header);
        let names = |stack: &LayerStack, index| {
            stack
                .older(index)
                .iter()
                .map(|name| String::from_utf8(name.to_vec()).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(disk.top(2), "6/1.2");
        assert_eq!(names(&disk, 2), ["5/1.2", "2/1.2", "1/1.2"]);
        assert_eq!(names(&disk, 3), ["5/1.3", "2/1.3"]);
        assert_eq!(names(&disk, 10), ["5/1.a"]);
        let snapshot = LayerStack::of_snapshot(&header, 2);
        assert_eq!(snapshot.top(2), "2/1.2");
        assert_eq!(names(&snapshot, 2), ["1/1.2"]);
        assert!(!snapshot.has_older(3) && names(&snapshot, 3).is_empty());
    }
}
