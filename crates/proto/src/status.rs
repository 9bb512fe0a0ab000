//! How a command ended: the 15-bit status field of a completion, and the name of every code.

use core::fmt;

use crate::wire::{bits, flags};

/// The status field of a completion (dword 3, bits 31:17): SC 7:0, SCT 10:8, CRD 12:11, M 13, DNR 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Status(pub u16);

/// Status code types (SCT).
pub mod sct {
    /// Codes that any command may end with.
    pub const GENERIC: u8 = 0;
    /// Codes whose meaning depends on the command.
    pub const COMMAND: u8 = 1;
    /// Media and data integrity errors.
    pub const MEDIA: u8 = 2;
    /// Errors of the path between host and namespace.
    pub const PATH: u8 = 3;
    /// The vendor's own codes.
    pub const VENDOR: u8 = 7;
}

/// One table drives the constants and their names.
macro_rules! statuses {
    ($($name:ident $sct:literal $sc:literal $text:literal)*) => {
        impl Status {
            $(
                #[doc = concat!($text, ".")]
                pub const $name: Self = Self($sct << 8 | $sc);
            )*
        }

        /// Every status that has a name.
        pub const ALL: &[(Status, &str)] = &[$((Status::$name, $text)),*];
    };
}

statuses! {
    SUCCESS 0 0x00 "Successful Completion"
    INVALID_OPCODE 0 0x01 "Invalid Command Opcode"
    INVALID_FIELD 0 0x02 "Invalid Field in Command"
    CID_CONFLICT 0 0x03 "Command ID Conflict"
    DATA_TRANSFER_ERROR 0 0x04 "Data Transfer Error"
    ABORTED_POWER_LOSS 0 0x05 "Commands Aborted due to Power Loss Notification"
    INTERNAL_ERROR 0 0x06 "Internal Error"
    ABORT_REQUESTED 0 0x07 "Command Abort Requested"
    ABORTED_SQ_DELETION 0 0x08 "Command Aborted due to SQ Deletion"
    ABORTED_FAILED_FUSED 0 0x09 "Command Aborted due to Failed Fused Command"
    ABORTED_MISSING_FUSED 0 0x0a "Command Aborted due to Missing Fused Command"
    INVALID_NAMESPACE 0 0x0b "Invalid Namespace or Format"
    COMMAND_SEQUENCE_ERROR 0 0x0c "Command Sequence Error"
    INVALID_SGL_SEGMENT 0 0x0d "Invalid SGL Segment Descriptor"
    INVALID_SGL_COUNT 0 0x0e "Invalid Number of SGL Descriptors"
    DATA_SGL_LENGTH_INVALID 0 0x0f "Data SGL Length Invalid"
    METADATA_SGL_LENGTH_INVALID 0 0x10 "Metadata SGL Length Invalid"
    SGL_TYPE_INVALID 0 0x11 "SGL Descriptor Type Invalid"
    INVALID_CMB_USE 0 0x12 "Invalid Use of Controller Memory Buffer"
    INVALID_PRP_OFFSET 0 0x13 "Invalid PRP Offset"
    ATOMIC_WRITE_UNIT_EXCEEDED 0 0x14 "Atomic Write Unit Exceeded"
    OPERATION_DENIED 0 0x15 "Operation Denied"
    SGL_OFFSET_INVALID 0 0x16 "SGL Offset Invalid"
    HOST_ID_INCONSISTENT 0 0x18 "Host Identifier Inconsistent Format"
    KEEP_ALIVE_EXPIRED 0 0x19 "Keep Alive Timer Expired"
    KEEP_ALIVE_INVALID 0 0x1a "Keep Alive Timeout Invalid"
    ABORTED_PREEMPT 0 0x1b "Command Aborted due to Preempt and Abort"
    SANITIZE_FAILED 0 0x1c "Sanitize Failed"
    SANITIZE_IN_PROGRESS 0 0x1d "Sanitize In Progress"
    SGL_GRANULARITY_INVALID 0 0x1e "SGL Data Block Granularity Invalid"
    NOT_SUPPORTED_IN_CMB 0 0x1f "Command Not Supported for Queue in CMB"
    NAMESPACE_WRITE_PROTECTED 0 0x20 "Namespace is Write Protected"
    COMMAND_INTERRUPTED 0 0x21 "Command Interrupted"
    TRANSIENT_TRANSPORT_ERROR 0 0x22 "Transient Transport Error"
    PROHIBITED_BY_LOCKDOWN 0 0x23 "Command Prohibited by Command and Feature Lockdown"
    ADMIN_MEDIA_NOT_READY 0 0x24 "Admin Command Media Not Ready"
    LBA_OUT_OF_RANGE 0 0x80 "LBA Out of Range"
    CAPACITY_EXCEEDED 0 0x81 "Capacity Exceeded"
    NAMESPACE_NOT_READY 0 0x82 "Namespace Not Ready"
    RESERVATION_CONFLICT 0 0x83 "Reservation Conflict"
    FORMAT_IN_PROGRESS 0 0x84 "Format In Progress"
    INVALID_VALUE_SIZE 0 0x85 "Invalid Value Size"
    INVALID_KEY_SIZE 0 0x86 "Invalid Key Size"
    KEY_DOES_NOT_EXIST 0 0x87 "KV Key Does Not Exist"
    UNRECOVERED_ERROR 0 0x88 "Unrecovered Error"
    KEY_EXISTS 0 0x89 "Key Exists"

    CQ_INVALID 1 0x00 "Completion Queue Invalid"
    INVALID_QUEUE_ID 1 0x01 "Invalid Queue Identifier"
    INVALID_QUEUE_SIZE 1 0x02 "Invalid Queue Size"
    ABORT_LIMIT_EXCEEDED 1 0x03 "Abort Command Limit Exceeded"
    AER_LIMIT_EXCEEDED 1 0x05 "Asynchronous Event Request Limit Exceeded"
    INVALID_FIRMWARE_SLOT 1 0x06 "Invalid Firmware Slot"
    INVALID_FIRMWARE_IMAGE 1 0x07 "Invalid Firmware Image"
    INVALID_INTERRUPT_VECTOR 1 0x08 "Invalid Interrupt Vector"
    INVALID_LOG_PAGE 1 0x09 "Invalid Log Page"
    INVALID_FORMAT 1 0x0a "Invalid Format"
    FIRMWARE_NEEDS_CONVENTIONAL_RESET 1 0x0b "Firmware Activation Requires Conventional Reset"
    INVALID_QUEUE_DELETION 1 0x0c "Invalid Queue Deletion"
    FEATURE_NOT_SAVEABLE 1 0x0d "Feature Identifier Not Saveable"
    FEATURE_NOT_CHANGEABLE 1 0x0e "Feature Not Changeable"
    FEATURE_NOT_NAMESPACE_SPECIFIC 1 0x0f "Feature Not Namespace Specific"
    FIRMWARE_NEEDS_SUBSYSTEM_RESET 1 0x10 "Firmware Activation Requires NVM Subsystem Reset"
    FIRMWARE_NEEDS_CONTROLLER_RESET 1 0x11 "Firmware Activation Requires Controller Level Reset"
    FIRMWARE_NEEDS_TIME 1 0x12 "Firmware Activation Requires Maximum Time Violation"
    FIRMWARE_PROHIBITED 1 0x13 "Firmware Activation Prohibited"
    OVERLAPPING_RANGE 1 0x14 "Overlapping Range"
    NAMESPACE_INSUFFICIENT_CAPACITY 1 0x15 "Namespace Insufficient Capacity"
    NAMESPACE_ID_UNAVAILABLE 1 0x16 "Namespace Identifier Unavailable"
    NAMESPACE_ALREADY_ATTACHED 1 0x18 "Namespace Already Attached"
    NAMESPACE_IS_PRIVATE 1 0x19 "Namespace Is Private"
    NAMESPACE_NOT_ATTACHED 1 0x1a "Namespace Not Attached"
    THIN_PROVISIONING_NOT_SUPPORTED 1 0x1b "Thin Provisioning Not Supported"
    CONTROLLER_LIST_INVALID 1 0x1c "Controller List Invalid"
    SELF_TEST_IN_PROGRESS 1 0x1d "Device Self-test In Progress"
    BOOT_PARTITION_WRITE_PROHIBITED 1 0x1e "Boot Partition Write Prohibited"
    INVALID_CONTROLLER_ID 1 0x1f "Invalid Controller Identifier"
    INVALID_SECONDARY_STATE 1 0x20 "Invalid Secondary Controller State"
    INVALID_RESOURCE_COUNT 1 0x21 "Invalid Number of Controller Resources"
    INVALID_RESOURCE_ID 1 0x22 "Invalid Resource Identifier"
    SANITIZE_PROHIBITED_BY_PMR 1 0x23 "Sanitize Prohibited While Persistent Memory Region is Enabled"
    ANA_GROUP_INVALID 1 0x24 "ANA Group Identifier Invalid"
    ANA_ATTACH_FAILED 1 0x25 "ANA Attach Failed"
    INSUFFICIENT_CAPACITY 1 0x26 "Insufficient Capacity"
    ATTACHMENT_LIMIT_EXCEEDED 1 0x27 "Namespace Attachment Limit Exceeded"
    PROHIBITION_NOT_SUPPORTED 1 0x28 "Prohibition of Command Execution Not Supported"
    COMMAND_SET_NOT_SUPPORTED 1 0x29 "I/O Command Set Not Supported"
    COMMAND_SET_NOT_ENABLED 1 0x2a "I/O Command Set Not Enabled"
    COMMAND_SET_COMBINATION_REJECTED 1 0x2b "I/O Command Set Combination Rejected"
    INVALID_COMMAND_SET 1 0x2c "Invalid I/O Command Set"
    IDENTIFIER_UNAVAILABLE 1 0x2d "Identifier Unavailable"

    CONFLICTING_ATTRIBUTES 1 0x80 "Conflicting Attributes"
    INVALID_PROTECTION_INFO 1 0x81 "Invalid Protection Information"
    WRITE_TO_READ_ONLY 1 0x82 "Attempted Write to Read Only Range"
    COMMAND_SIZE_LIMIT_EXCEEDED 1 0x83 "Command Size Limit Exceeded"
    INCOMPATIBLE_NAMESPACE 1 0x85 "Incompatible Namespace or Format"
    FAST_COPY_NOT_POSSIBLE 1 0x86 "Fast Copy Not Possible"
    OVERLAPPING_IO_RANGE 1 0x87 "Overlapping I/O Range"
    INSUFFICIENT_RESOURCES 1 0x89 "Insufficient Resources"
    ZONED_BOUNDARY_ERROR 1 0xb8 "Zoned Boundary Error"
    ZONE_IS_FULL 1 0xb9 "Zone Is Full"
    ZONE_IS_READ_ONLY 1 0xba "Zone Is Read Only"
    ZONE_IS_OFFLINE 1 0xbb "Zone Is Offline"
    ZONE_INVALID_WRITE 1 0xbc "Zone Invalid Write"
    TOO_MANY_ACTIVE_ZONES 1 0xbd "Too Many Active Zones"
    TOO_MANY_OPEN_ZONES 1 0xbe "Too Many Open Zones"
    INVALID_ZONE_TRANSITION 1 0xbf "Invalid Zone State Transition"

    WRITE_FAULT 2 0x80 "Write Fault"
    UNRECOVERED_READ 2 0x81 "Unrecovered Read Error"
    GUARD_CHECK 2 0x82 "End-to-end Guard Check Error"
    APPTAG_CHECK 2 0x83 "End-to-end Application Tag Check Error"
    REFTAG_CHECK 2 0x84 "End-to-end Reference Tag Check Error"
    COMPARE_FAILURE 2 0x85 "Compare Failure"
    ACCESS_DENIED 2 0x86 "Access Denied"
    DEALLOCATED 2 0x87 "Deallocated or Unwritten Logical Block"
    STORAGE_TAG_CHECK 2 0x88 "End-to-end Storage Tag Check Error"

    INTERNAL_PATH_ERROR 3 0x00 "Internal Path Error"
    ANA_PERSISTENT_LOSS 3 0x01 "Asymmetric Access Persistent Loss"
    ANA_INACCESSIBLE 3 0x02 "Asymmetric Access Inaccessible"
    ANA_TRANSITION 3 0x03 "Asymmetric Access Transition"
    CONTROLLER_PATH_ERROR 3 0x60 "Controller Pathing Error"
    HOST_PATH_ERROR 3 0x70 "Host Pathing Error"
    ABORTED_BY_HOST 3 0x71 "Command Aborted By Host"
}

impl Status {
    bits! { u16;
        /// Status code.
        sc with_sc 0 8 u8;
        /// Status code type.
        sct with_sct 8 3 u8;
        /// Command retry delay: 0 none, 1 to 3 name one of the controller's CRDT times.
        crd with_crd 11 2 u8;
        /// Type and code together: `sct << 8 | sc`.
        code with_code 0 11 u16;
    }
    flags! { u16;
        /// The error log has more about this.
        more more_set 13;
        /// Do not retry: the same command would fail again.
        dnr dnr_set 14;
    }

    /// A status from its type (0 to 7) and code.
    #[inline(always)]
    #[must_use]
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self(0).with_sct(sct).with_sc(sc)
    }

    /// True if the command succeeded.
    #[inline(always)]
    #[must_use]
    pub const fn is_ok(self) -> bool {
        self.code() == 0
    }

    /// True if the command failed and may be tried again.
    #[inline(always)]
    #[must_use]
    pub const fn may_retry(self) -> bool {
        !self.is_ok() && !self.dnr()
    }

    /// True if type and code are the same; the retry bits are not compared.
    #[inline(always)]
    #[must_use]
    pub const fn is(self, other: Self) -> bool {
        self.code() == other.code()
    }

    /// The same status with Do Not Retry.
    #[inline(always)]
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        self.dnr_set(true)
    }

    /// The same status with More.
    #[inline(always)]
    #[must_use]
    pub const fn with_more(self) -> Self {
        self.more_set(true)
    }

    /// The specification's name for this status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match ALL.iter().find(|(known, _)| known.is(self)) {
            Some((_, name)) => name,
            None if self.sct() == sct::VENDOR || self.sc() >= 0xc0 => "Vendor Specific",
            None => "Unknown Status",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{:02x}h)", self.name(), self.sct(), self.sc())?;
        if self.crd() != 0 {
            write!(f, ", retry delay {}", self.crd())?;
        }
        if self.more() {
            f.write_str(", more in the error log")?;
        }
        if self.dnr() { f.write_str(", do not retry") } else { Ok(()) }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
