//! Decodes the options that a client sends during the negotiation.
//!
//! Source: the sections "Newstyle negotiation" and "Option types" of the NBD protocol.

use bytes::Buf;

use crate::error::NbdViolation;

/// The magic number of options, which is also part of the greeting: `IHAVEOPT`.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
/// Number of the option `EXPORT_NAME`, to which a server cannot reply with an error.
pub(crate) const EXPORT_NAME: u32 = 1;
/// Name of the metadata context that states which ranges have data.
pub(crate) const ALLOCATION: &str = "base:allocation";
/// Maximum length of a string, in bytes.
const STRING_MAX: usize = 4096;

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OptionHeader {
    /// Number of the option.
    pub kind: u32,
    /// Length of the data that follows, in bytes, as the client announces it.
    pub len: u32,
}

impl OptionHeader {
    /// Length of a header, in bytes.
    pub const LEN: usize = 16;

    /// Decodes a header.
    ///
    /// # Errors
    /// If the magic number is wrong.
    pub fn decode(bytes: &[u8; OptionHeader::LEN]) -> Result<OptionHeader, NbdViolation> {
        let mut bytes = &bytes[..];
        match bytes.get_u64() {
            OPTION_MAGIC => Ok(OptionHeader { kind: bytes.get_u32(), len: bytes.get_u32() }),
            magic => Err(NbdViolation::OptionMagic(magic)),
        }
    }
}

/// An option with its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ClientOption<'a> {
    /// Use the export with this name from now on. The server cannot refuse it with a reply.
    ExportName(&'a str),
    /// End the negotiation and the connection.
    Abort,
    /// List the exports.
    List,
    /// Describe an export.
    Info(InfoRequest<'a>),
    /// Describe an export, and use it from now on.
    Go(InfoRequest<'a>),
    /// Use structured replies.
    StructuredReply,
    /// List the metadata contexts of an export.
    ListMetaContext(ContextQuery<'a>),
    /// Select the metadata contexts of an export.
    SetMetaContext(ContextQuery<'a>),
}

/// A request for the description of an export. The reply always contains size, flags and block sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InfoRequest<'a> {
    /// Name of the export.
    pub name: &'a str,
    /// Whether the reply shall contain the name.
    pub wants_name: bool,
    /// Whether the reply shall contain the text that describes the export.
    pub wants_description: bool,
}

/// A query for metadata contexts of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContextQuery<'a> {
    /// Name of the export.
    pub export: &'a str,
    /// Whether the client sent no queries. When contexts are listed, this means all contexts.
    pub is_empty: bool,
    /// Whether a query names the context [`ALLOCATION`].
    pub names_allocation: bool,
    /// Whether a query names all contexts of the namespace `base:`.
    pub names_base: bool,
}

/// The reason why an option is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OptionRefusal {
    /// Type of the reply.
    pub code: RefusalCode,
    /// Text for a user.
    pub text: &'static str,
}

/// The reply types that refuse an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RefusalCode {
    /// The server does not know or support the option.
    Unsupported = (1 << 31) + 1,
    /// The data of the option is not valid.
    Invalid = (1 << 31) + 3,
    /// The export does not exist.
    Unknown = (1 << 31) + 6,
    /// The data of the option is too long.
    TooBig = (1 << 31) + 9,
}

const fn invalid(text: &'static str) -> OptionRefusal {
    OptionRefusal { code: RefusalCode::Invalid, text }
}

const TRUNCATED: OptionRefusal = invalid("the data of the option ends too early");

impl<'a> ClientOption<'a> {
    /// Decodes the data of option `kind`.
    ///
    /// # Errors
    /// The reason to refuse the option.
    pub fn decode(kind: u32, data: &'a [u8]) -> Result<ClientOption<'a>, OptionRefusal> {
        match kind {
            EXPORT_NAME => Ok(ClientOption::ExportName(string(data)?)),
            2 => Ok(ClientOption::Abort),
            3 => without_data(data, ClientOption::List),
            5 => Err(OptionRefusal { code: RefusalCode::Unsupported, text: "the server has no TLS" }),
            6 => Ok(ClientOption::Info(InfoRequest::decode(data)?)),
            7 => Ok(ClientOption::Go(InfoRequest::decode(data)?)),
            8 => without_data(data, ClientOption::StructuredReply),
            9 => Ok(ClientOption::ListMetaContext(ContextQuery::decode(data)?)),
            10 => Ok(ClientOption::SetMetaContext(ContextQuery::decode(data)?)),
            _ => Err(OptionRefusal {
                code: RefusalCode::Unsupported,
                text: "the server does not know this option",
            }),
        }
    }
}

impl<'a> InfoRequest<'a> {
    fn decode(mut data: &'a [u8]) -> Result<InfoRequest<'a>, OptionRefusal> {
        let name = counted_string(&mut data)?;
        let count = data.try_get_u16().map_err(|_| TRUNCATED)?;
        if data.len() != 2 * usize::from(count) {
            return Err(invalid("the number of requested items does not match the length"));
        }
        let wants = |item: u16| data.chunks_exact(2).any(|asked| asked == item.to_be_bytes());
        Ok(InfoRequest { name, wants_name: wants(1), wants_description: wants(2) })
    }
}

impl<'a> ContextQuery<'a> {
    fn decode(mut data: &'a [u8]) -> Result<ContextQuery<'a>, OptionRefusal> {
        let export = counted_string(&mut data)?;
        let count = data.try_get_u32().map_err(|_| TRUNCATED)?;
        let mut query =
            ContextQuery { export, is_empty: count == 0, names_allocation: false, names_base: false };
        // Each query takes at least the four bytes of its length, so the data bounds the loop.
        for _ in 0..count {
            match counted_string(&mut data)? {
                ALLOCATION => query.names_allocation = true,
                "base:" => query.names_base = true,
                _ => (),
            }
        }
        if !data.is_empty() {
            return Err(invalid("bytes follow the last query"));
        }
        Ok(query)
    }
}

fn without_data<'a>(data: &[u8], option: ClientOption<'a>) -> Result<ClientOption<'a>, OptionRefusal> {
    match data {
        [] => Ok(option),
        _ => Err(invalid("the option has no data")),
    }
}

/// Takes a string that is preceded by its length.
fn counted_string<'a>(data: &mut &'a [u8]) -> Result<&'a str, OptionRefusal> {
    let len = data.try_get_u32().map_err(|_| TRUNCATED)?;
    let len = usize::try_from(len).map_err(|_| TRUNCATED)?;
    let (text, rest) = data.split_at_checked(len).ok_or(TRUNCATED)?;
    *data = rest;
    string(text)
}

fn string(bytes: &[u8]) -> Result<&str, OptionRefusal> {
    if bytes.len() > STRING_MAX {
        return Err(invalid("a string has more than 4096 bytes"));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(invalid("a string is not UTF-8, or contains NUL")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counted(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn a_request_for_information_names_its_items() {
        let mut data = counted("vm1");
        data.extend([0, 2, 0, 3, 0, 2]);
        let expected = InfoRequest { name: "vm1", wants_name: false, wants_description: true };
        assert_eq!(ClientOption::decode(7, &data), Ok(ClientOption::Go(expected.clone())));
        assert_eq!(ClientOption::decode(6, &data), Ok(ClientOption::Info(expected)));
        data.push(0);
        let refusal = ClientOption::decode(7, &data).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Invalid);
    }

    #[test]
    fn announced_counts_beyond_the_data_are_refused() {
        let mut data = counted("vm1");
        data.extend(u32::MAX.to_be_bytes());
        assert_eq!(ClientOption::decode(10, &data), Err(TRUNCATED));
        let name_only = u32::MAX.to_be_bytes();
        assert_eq!(ClientOption::decode(6, &name_only), Err(TRUNCATED));
    }

    #[test]
    fn strings_are_limited_and_valid() {
        for bad in [vec![b'x'; STRING_MAX + 1], vec![0xff], vec![b'a', 0]] {
            assert_eq!(ClientOption::decode(EXPORT_NAME, &bad).unwrap_err().code, RefusalCode::Invalid);
        }
        let longest = vec![b'x'; STRING_MAX];
        assert!(ClientOption::decode(EXPORT_NAME, &longest).is_ok());
    }

    proptest! {
        #[test]
        fn no_header_panics(bytes: [u8; OptionHeader::LEN]) {
            let _ = OptionHeader::decode(&bytes);
        }

        #[test]
        fn no_option_panics(kind in 0u32..16, data in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ClientOption::decode(kind, &data);
        }

        #[test]
        fn no_option_with_a_valid_name_panics(
            kind in 6u32..11,
            name in "[a-z]{0,8}",
            rest in prop::collection::vec(0u8..4, 0..40),
        ) {
            let data = [counted(&name), rest].concat();
            let _ = ClientOption::decode(kind, &data);
        }
    }
}
