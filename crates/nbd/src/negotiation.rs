//! [`Negotiation`]: the state of a negotiation, and the replies to options, without input and output.
//!
//! Source: the sections "Option types" and "Option reply types" of the NBD protocol.

use bytes::{BufMut, BytesMut};
use disk::BLOCK;

use crate::error::{Error, NbdViolation};
use crate::export::{Export, Exports};
use crate::limits::PREFERRED_BLOCK;
use crate::option::{
    ALLOCATION, ClientOption, ContextQuery, EXPORT_NAME, InfoRequest, OptionRefusal, RefusalCode,
};

/// Metadata context ID of `base:allocation`.
pub(crate) const ALLOCATION_ID: u32 = 1;

const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const ACK: u32 = 1;
const SERVER: u32 = 2;
const INFO: u32 = 3;
const META_CONTEXT: u32 = 4;

const INFO_EXPORT: u16 = 0;
const INFO_NAME: u16 = 1;
const INFO_DESCRIPTION: u16 = 2;
const INFO_BLOCK_SIZE: u16 = 3;

/// Number of zeros that end the reply to `EXPORT_NAME`, unless the client declined them.
const RESERVED_LEN: usize = 124;

const HAS_FLAGS: u16 = 1 << 0;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
const SEND_TRIM: u16 = 1 << 5;
const SEND_WRITE_ZEROES: u16 = 1 << 6;
const SEND_DF: u16 = 1 << 7;
const CAN_MULTI_CONN: u16 = 1 << 8;

/// What client and server have agreed on.
#[derive(Debug, Clone)]
pub(crate) struct Agreement {
    /// The export that the client uses.
    pub export: Export,
    /// Whether the server sends structured replies.
    pub is_structured: bool,
    /// Whether the client may ask which ranges have data.
    pub has_allocation: bool,
}

/// What follows an option.
#[derive(Debug)]
pub(crate) enum NegotiationStep {
    /// The next option.
    NextOption,
    /// The first request.
    Transmission(Agreement),
    /// The end of the connection.
    End,
}

/// The state of a negotiation.
pub(crate) struct Negotiation<'a> {
    exports: &'a dyn Exports,
    payload_bytes_max: u32,
    /// Whether the reply to `EXPORT_NAME` omits the reserved zeros.
    omits_zeroes: bool,
    is_structured: bool,
    /// Name of the export for which the client has selected `base:allocation`.
    allocation_of: Option<String>,
}

impl<'a> Negotiation<'a> {
    /// Begins a negotiation. `payload_bytes_max` is the maximum payload of a request.
    pub fn new(exports: &'a dyn Exports, payload_bytes_max: u32, omits_zeroes: bool) -> Negotiation<'a> {
        Negotiation { exports, payload_bytes_max, omits_zeroes, is_structured: false, allocation_of: None }
    }

    /// Appends the replies to an option to `replies`.
    ///
    /// # Errors
    /// If the connection must end without a reply.
    pub fn answer(
        &mut self,
        kind: u32,
        data: &[u8],
        replies: &mut BytesMut,
    ) -> Result<NegotiationStep, Error> {
        let mut replies = Replies { kind, bytes: replies };
        let option = match ClientOption::decode(kind, data) {
            Ok(option) => option,
            Err(refusal) if kind == EXPORT_NAME => return Err(NbdViolation::ExportName(refusal.text).into()),
            Err(refusal) => return Ok(replies.refuse(refusal)),
        };
        match option {
            ClientOption::ExportName(name) => self.export_name(name, replies.bytes),
            ClientOption::Abort => {
                replies.acknowledge();
                Ok(NegotiationStep::End)
            }
            ClientOption::List => {
                for (name, description) in self.exports.list() {
                    replies.server(&name, &description);
                }
                Ok(replies.acknowledge())
            }
            ClientOption::Info(request) => Ok(match self.describe(&request, &mut replies) {
                Ok(_) => replies.acknowledge(),
                Err(refusal) => replies.refuse(refusal),
            }),
            ClientOption::Go(request) => Ok(match self.describe(&request, &mut replies) {
                Ok(export) => {
                    replies.acknowledge();
                    NegotiationStep::Transmission(self.agree(request.name, export))
                }
                Err(refusal) => replies.refuse(refusal),
            }),
            ClientOption::StructuredReply => {
                self.is_structured = true;
                Ok(replies.acknowledge())
            }
            ClientOption::ListMetaContext(query) => Ok(match self.check_query(&query) {
                Ok(()) => {
                    if query.is_empty || query.names_allocation || query.names_base {
                        replies.context(0);
                    }
                    replies.acknowledge()
                }
                Err(refusal) => replies.refuse(refusal),
            }),
            ClientOption::SetMetaContext(query) => {
                self.allocation_of = None;
                Ok(match self.check_query(&query) {
                    Ok(()) => {
                        if query.names_allocation {
                            self.allocation_of = Some(query.export.to_owned());
                            replies.context(ALLOCATION_ID);
                        }
                        replies.acknowledge()
                    }
                    Err(refusal) => replies.refuse(refusal),
                })
            }
        }
    }

    fn find(&self, name: &str) -> Result<Export, OptionRefusal> {
        self.exports
            .find(name)
            .ok_or(OptionRefusal { code: RefusalCode::Unknown, text: "there is no export with this name" })
    }

    fn check_query(&self, query: &ContextQuery) -> Result<(), OptionRefusal> {
        if !self.is_structured {
            let text = "metadata contexts need structured replies";
            return Err(OptionRefusal { code: RefusalCode::Invalid, text });
        }
        self.find(query.export).map(|_| ())
    }

    fn describe(&self, request: &InfoRequest, replies: &mut Replies) -> Result<Export, OptionRefusal> {
        let export = self.find(request.name)?;
        replies.info(INFO_EXPORT, |bytes| {
            bytes.put_u64(*export.disk.size().borrow());
            bytes.put_u16(self.flags(&export));
        });
        replies.info(INFO_BLOCK_SIZE, |bytes| {
            bytes.put_u32(BLOCK as u32);
            bytes.put_u32(PREFERRED_BLOCK);
            bytes.put_u32(self.payload_bytes_max);
        });
        if request.wants_name {
            replies.info(INFO_NAME, |bytes| bytes.put_slice(request.name.as_bytes()));
        }
        if request.wants_description && !export.description.is_empty() {
            replies.info(INFO_DESCRIPTION, |bytes| bytes.put_slice(export.description.as_bytes()));
        }
        Ok(export)
    }

    fn export_name(&self, name: &str, bytes: &mut BytesMut) -> Result<NegotiationStep, Error> {
        let export = self.find(name).map_err(|_| Error::UnknownExport(name.to_owned()))?;
        bytes.put_u64(*export.disk.size().borrow());
        bytes.put_u16(self.flags(&export));
        if !self.omits_zeroes {
            bytes.put_bytes(0, RESERVED_LEN);
        }
        Ok(NegotiationStep::Transmission(self.agree(name, export)))
    }

    fn agree(&self, name: &str, export: Export) -> Agreement {
        // Contexts that were selected for another export do not count.
        let has_allocation = self.allocation_of.as_deref() == Some(name);
        Agreement { export, is_structured: self.is_structured, has_allocation }
    }

    /// Returns the transmission flags. Each completed change is durable and visible to all
    /// connections, which makes `FLUSH`, `FUA` and `CAN_MULTI_CONN` true without work.
    fn flags(&self, export: &Export) -> u16 {
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN;
        flags |= if export.is_read_only { READ_ONLY } else { SEND_TRIM | SEND_WRITE_ZEROES };
        if self.is_structured {
            flags |= SEND_DF;
        }
        flags
    }
}

/// Encodes the replies to one option.
struct Replies<'a> {
    /// Number of the option.
    kind: u32,
    bytes: &'a mut BytesMut,
}

impl Replies<'_> {
    fn head(&mut self, code: u32, len: usize) {
        self.bytes.put_u64(REPLY_MAGIC);
        self.bytes.put_u32(self.kind);
        self.bytes.put_u32(code);
        self.bytes.put_u32(u32::try_from(len).expect("replies to options are short"));
    }

    fn acknowledge(&mut self) -> NegotiationStep {
        self.head(ACK, 0);
        NegotiationStep::NextOption
    }

    fn refuse(&mut self, refusal: OptionRefusal) -> NegotiationStep {
        self.head(refusal.code as u32, refusal.text.len());
        self.bytes.put_slice(refusal.text.as_bytes());
        NegotiationStep::NextOption
    }

    fn server(&mut self, name: &str, description: &str) {
        self.head(SERVER, 4 + name.len() + description.len());
        self.bytes.put_u32(u32::try_from(name.len()).expect("names are short"));
        self.bytes.put_slice(name.as_bytes());
        self.bytes.put_slice(description.as_bytes());
    }

    fn info(&mut self, item: u16, put: impl FnOnce(&mut BytesMut)) {
        let mut content = BytesMut::new();
        content.put_u16(item);
        put(&mut content);
        self.head(INFO, content.len());
        self.bytes.put_slice(&content);
    }

    fn context(&mut self, id: u32) {
        self.head(META_CONTEXT, 4 + ALLOCATION.len());
        self.bytes.put_u32(id);
        self.bytes.put_slice(ALLOCATION.as_bytes());
    }
}

/// Appends the reply that refuses an option whose data was too long to read.
pub(crate) fn refuse_as_too_big(kind: u32, replies: &mut BytesMut) {
    let text = "the data of the option is too long";
    Replies { kind, bytes: replies }.refuse(OptionRefusal { code: RefusalCode::TooBig, text });
}
