//! Divides many items among transactions, because a store limits the size of a transaction.

use bytes::Bytes;

/// Approximate number of bytes of items in one transaction.
const PAGE: usize = 64 << 10;

/// Removes as many keys from the iterator as fit in one transaction.
pub(crate) fn page(keys: &mut impl Iterator<Item = Bytes>) -> Vec<Bytes> {
    page_by(keys, Bytes::len)
}

/// Removes as many items from the iterator as fit in one transaction. `len` returns the size of an
/// item in bytes.
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
