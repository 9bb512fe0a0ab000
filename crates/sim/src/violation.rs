//! The rules of the specification, and their violations by the driver.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Enough for a diagnosis; a driver in a loop must not exhaust memory.
const KEPT: usize = 4096;

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $rule:ident, $name:literal, $section:literal;)*) => {
        /// A rule of the NVMe specification that the simulator checks.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Rule {
            $($(#[doc = $doc])* $rule,)*
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Rule] = &[$(Rule::$rule,)*];

            /// Its short name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Rule::$rule => $name,)* }
            }

            /// Where the specification states it, in words.
            #[must_use]
            pub const fn section(self) -> &'static str {
                match self { $(Rule::$rule => $section,)* }
            }
        }
    };
}

rules! {
    /// A register was accessed at an offset that is not a multiple of four, or lies beyond the BAR.
    RegisterAccess, "register-access", "Base, Memory-Based Controller Properties: aligned accesses of native width";
    /// A read-only register was written.
    ReadOnlyRegister, "read-only-register", "Base, Controller Properties: type RO";
    /// A doorbell was read.
    DoorbellRead, "doorbell-read", "Base, Submission Queue y Tail Doorbell: a read returns a vendor specific value";
    /// AQA, ASQ or ACQ was written while the controller was enabled.
    QueueRegisterWhileEnabled, "queue-register-while-enabled", "Base, Controller Configuration, EN: AQA, ASQ and ACQ are set while EN is 0";
    /// CSS, MPS or AMS changed while the controller was enabled, or the entry sizes while queues existed.
    ConfigWhileEnabled, "config-while-enabled", "Base, Controller Configuration: these fields change only while EN is 0";
    /// EN changed before RDY had followed its last change.
    EnableSequence, "enable-sequence", "Base, Controller Configuration, EN: wait for CSTS.RDY before EN is changed again";
    /// The admin queues are misaligned or too small when the controller is enabled.
    AdminQueue, "admin-queue", "Base, Admin Queue Attributes and Base Address properties";
    /// CC.MPS is outside CAP.MPSMIN to CAP.MPSMAX.
    PageSize, "page-size", "Base, Controller Configuration, MPS";
    /// CC.CSS or CC.AMS has a value that CAP does not offer.
    CommandSet, "command-set", "Base, Controller Configuration, CSS and AMS";
    /// CC.IOSQES or CC.IOCQES does not fit Identify's SQES and CQES when an I/O queue is created.
    EntrySize, "entry-size", "Base, Controller Configuration, IOSQES and IOCQES";
    /// A reserved bit of a register was set.
    ReservedRegisterBit, "reserved-register-bit", "Base, Controller Properties: reserved bits are written as zero";
    /// A doorbell was rung while the controller was not ready.
    DoorbellNotReady, "doorbell-not-ready", "Base, Controller Status, RDY: commands are submitted once RDY is 1";
    /// A doorbell was rung after a shutdown had been asked for.
    DoorbellAfterShutdown, "doorbell-after-shutdown", "Base, Controller Shutdown: no commands are submitted after CC.SHN is set";
    /// The doorbell of a queue that does not exist was rung.
    DoorbellUnknownQueue, "doorbell-unknown-queue", "Base, Asynchronous Event, Error: Write to Invalid Doorbell Register";
    /// A doorbell was rung with a value outside the queue.
    DoorbellValue, "doorbell-value", "Base, Asynchronous Event, Error: Invalid Doorbell Write Value (out of range)";
    /// A doorbell was rung with the value that it had.
    DoorbellSame, "doorbell-same", "Base, Asynchronous Event, Error: Invalid Doorbell Write Value (same as before)";
    /// The tail passed the head that was reported to the host.
    SqOverrun, "sq-overrun", "Base, Asynchronous Event, Error: Invalid Doorbell Write Value (more than the free entries)";
    /// The head passed the entries that were posted.
    CqHeadPastPosted, "cq-head-past-posted", "Base, Asynchronous Event, Error: Invalid Doorbell Write Value (more than the posted entries)";
    /// More commands were outstanding than the completion queue can hold, so that the controller had to stall.
    CqOverrun, "cq-overrun", "Base, Completion Queue, Full Queue: the host keeps room for every outstanding command";
    /// A shadow doorbell and the doorbell itself differ.
    ShadowDoorbell, "shadow-doorbell", "Base, Updating Controller Doorbell Properties using a Shadow Doorbell Buffer";
    /// A command identifier was used again while its command was outstanding.
    CidInUse, "cid-in-use", "Base, Command Dword 0, CID; status Command ID Conflict";
    /// A command had the identifier FFFFh.
    CidReserved, "cid-reserved", "Base, Command Dword 0, CID: FFFFh should not be used, the Error Information log uses it";
    /// A command had an opcode that is reserved or not supported.
    Opcode, "opcode", "Base, Status Code Invalid Command Opcode";
    /// A reserved field of a command was not zero.
    ReservedField, "reserved-field", "Base, Status Code Invalid Field in Command: reserved coded values and fields";
    /// PSDT was 11b, or selected an SGL where none is allowed.
    Psdt, "psdt", "Base, Command Dword 0, PSDT";
    /// PRP1 was not aligned to a dword, or had an offset where none is allowed.
    Prp1, "prp1", "Base, Physical Region Page Entry: PRP1 of a command";
    /// PRP2 had a page offset, or its list pointer was not aligned.
    Prp2, "prp2", "Base, Physical Region Page Entry: PRP2, offset 0 or a list pointer aligned to a qword";
    /// An entry of a PRP list had an offset.
    PrpList, "prp-list", "Base, Physical Region Page List: all entries have offset 0";
    /// An SGL was malformed.
    Sgl, "sgl", "Base, Scatter Gather List";
    /// The metadata pointer was not aligned to a dword.
    MetadataPointer, "metadata-pointer", "Base, Command Format, MPTR";
    /// A transfer was longer than MDTS allows.
    Mdts, "mdts", "Base, Identify Controller, MDTS";
    /// The base of an I/O queue was not aligned to a page.
    QueueMisaligned, "queue-misaligned", "Base, Create I/O Queue commands, PRP1";
    /// A completion queue was deleted before its submission queues.
    QueueOrder, "queue-order", "Base, Delete I/O Completion Queue: its Submission Queues are deleted first";
    /// The number of queues was set after the first I/O queue had been created.
    NumberOfQueuesLate, "number-of-queues-late", "Base, Set Features, Number of Queues: before any I/O queue is created";
    /// More Asynchronous Event Requests were outstanding than AERL allows.
    AerLimit, "aer-limit", "Base, Identify Controller, AERL";
    /// More Aborts were outstanding than ACL allows.
    AbortLimit, "abort-limit", "Base, Identify Controller, ACL";
    /// A command was retried before the delay requested by CRD had passed.
    RetryTooSoon, "retry-too-soon", "Base, Completion Queue Entry, Status, CRD";
    /// The controller was made to access an unmapped address.
    DmaUnmapped, "dma-unmapped", "PCIe: a device reaches only memory that is mapped for it";
    /// The controller was made to access past the end of a mapping.
    DmaPastEnd, "dma-past-end", "PCIe: a device reaches only memory that is mapped for it";
    /// The controller was made to write to read-only memory.
    DmaReadOnly, "dma-read-only", "PCIe: a device reaches memory as it is mapped for it, to read or to write";
    /// The controller was made to access something that is not memory shared with it.
    DmaNotShared, "dma-not-shared", "vfio-user: memory comes with a file descriptor";
    /// The controller was made to access memory while its function was not a bus master.
    BusMaster, "bus-master", "PCI, Command, Bus Master Enable: without it a function issues no requests";
    /// The controller memory buffer was set up or used against its rules.
    Cmb, "cmb", "Base, Controller Memory Buffer";
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A violation of a rule by the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The queue, if any.
    pub queue: Option<u16>,
    /// What happened, with its numbers.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.queue {
            Some(queue) => write!(f, "{} on queue {queue}: {}", self.rule, self.detail),
            None => write!(f, "{}: {}", self.rule, self.detail),
        }
    }
}

/// The list of violations; clones are the same list.
#[derive(Clone, Default)]
pub(crate) struct Book(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    kept: Vec<Violation>,
    /// The rules with a violation in `kept`.
    rules: HashSet<Rule>,
    count: u64,
}

impl Book {
    pub(crate) fn note(&self, rule: Rule, queue: Option<u16>, detail: impl Into<String>) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.count += 1;
        // A driver that violates one rule in a loop must not hide its violation of another.
        if entries.rules.insert(rule) || entries.kept.len() < KEPT {
            entries.kept.push(Violation { rule, queue, detail: detail.into() });
        }
    }

    pub(crate) fn all(&self) -> Vec<Violation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).kept.clone()
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_each_rule_is_kept_and_all_are_counted() {
        let book = Book::default();
        for _ in 0..5000 {
            book.note(Rule::DoorbellSame, Some(1), "again");
        }
        book.note(Rule::CidInUse, Some(1), "late");
        book.note(Rule::CidInUse, Some(1), "later");
        let all = book.all();
        assert_eq!((all.len(), book.count()), (KEPT + 1, 5002));
        assert!(all[..KEPT].iter().all(|violation| violation.rule == Rule::DoorbellSame));
        assert_eq!((all[KEPT].rule, all[KEPT].detail.as_str()), (Rule::CidInUse, "late"));
    }
}
