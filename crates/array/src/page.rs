//! Division of many items into transactions, whose size a store bounds.

use bytes::Bytes;

/// Bytes of items in one transaction.
const PAGE: usize = 64 << 10;

/// Takes as many keys as may be in one transaction.
pub(crate) fn page(keys: &mut impl Iterator<Item = Bytes>) -> Vec<Bytes> {
    page_by(keys, Bytes::len)
}

/// Takes as many items as may be in one transaction. `len` returns the bytes of one item.
pub(crate) fn page_by<T>(items: &mut impl Iterator<Item = T>, len: impl Fn(&T) -> usize) -> Vec<T> {
    let (mut page, mut bytes) = (Vec::new(), 0);
    while bytes < PAGE
        && let Some(item) = items.next()
    {
        bytes += len(&item) + 16;
        page.push(item);
    }
    page
}
