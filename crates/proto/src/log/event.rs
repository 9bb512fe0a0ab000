//! Asynchronous events: dword 0 of the completion of an Asynchronous Event Request.

use core::fmt;

use crate::wire::bits;

/// Event types.
pub mod event_type {
    /// An error that no command reports.
    pub const ERROR: u8 = 0;
    /// Health.
    pub const HEALTH: u8 = 1;
    /// A notice.
    pub const NOTICE: u8 = 2;
    /// Something that happens at once.
    pub const IMMEDIATE: u8 = 3;
    /// An event of the I/O command set.
    pub const COMMAND_SET: u8 = 6;
    /// The vendor's own.
    pub const VENDOR: u8 = 7;
}

/// What happened, and which log page has details.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct AsyncEvent(pub u32);

/// One table drives the constants and their names: name, type, information, log page.
macro_rules! events {
    ($($name:ident $kind:literal $info:literal $page:literal $text:literal)*) => {
        impl AsyncEvent {
            $(
                #[doc = concat!($text, ".")]
                pub const $name: Self = Self::new($kind, $info, $page);
            )*
        }

        /// Every event that has a name.
        pub(crate) const ALL: &[(AsyncEvent, &str)] = &[$((AsyncEvent::$name, $text)),*];
    };
}

events! {
    INVALID_DOORBELL_REGISTER 0 0x00 0x01 "Write to Invalid Doorbell Register"
    INVALID_DOORBELL_VALUE 0 0x01 0x01 "Invalid Doorbell Write Value"
    DIAGNOSTIC_FAILURE 0 0x02 0x01 "Diagnostic Failure"
    PERSISTENT_INTERNAL_ERROR 0 0x03 0x01 "Persistent Internal Error"
    TRANSIENT_INTERNAL_ERROR 0 0x04 0x01 "Transient Internal Error"
    FIRMWARE_LOAD_ERROR 0 0x05 0x01 "Firmware Image Load Error"
    RELIABILITY 1 0x00 0x02 "NVM Subsystem Reliability"
    TEMPERATURE 1 0x01 0x02 "Temperature Threshold"
    SPARE 1 0x02 0x02 "Spare Below Threshold"
    NAMESPACE_CHANGED 2 0x00 0x04 "Namespace Attribute Changed"
    FIRMWARE_ACTIVATION 2 0x01 0x03 "Firmware Activation Starting"
    TELEMETRY_CHANGED 2 0x02 0x08 "Telemetry Log Changed"
    ANA_CHANGED 2 0x03 0x0c "Asymmetric Namespace Access Change"
    PREDICTABLE_LATENCY_CHANGED 2 0x04 0x0b "Predictable Latency Event Aggregate Log Change"
    LBA_STATUS_ALERT 2 0x05 0x0e "LBA Status Information Alert"
    ENDURANCE_GROUP_CHANGED 2 0x06 0x0f "Endurance Group Event Aggregate Log Page Change"
    SUBSYSTEM_SHUTDOWN 3 0x00 0x00 "Normal NVM Subsystem Shutdown"
    RESERVATION_LOG 6 0x00 0x80 "Reservation Log Page Available"
    SANITIZE_COMPLETED 6 0x01 0x81 "Sanitize Operation Completed"
    SANITIZE_COMPLETED_DEALLOCATION 6 0x02 0x81 "Sanitize Operation Completed With Unexpected Deallocation"
}

impl AsyncEvent {
    bits! { u32;
        /// The type of event.
        kind with_kind 0 3 u8;
        /// What happened.
        info with_info 8 8 u8;
        /// The log page to read.
        page with_page 16 8 u8;
    }

    /// An event.
    #[must_use]
    pub const fn new(kind: u8, info: u8, page: u8) -> Self {
        Self(0).with_kind(kind).with_info(info).with_page(page)
    }

    /// True if the type and the information are the same.
    #[must_use]
    pub const fn is(self, other: Self) -> bool {
        self.kind() == other.kind() && self.info() == other.info()
    }

    /// The specification's name for this event.
    #[must_use]
    pub fn name(self) -> &'static str {
        match ALL.iter().find(|(known, _)| known.is(self)) {
            Some((_, name)) => name,
            None if self.kind() == event_type::VENDOR => "Vendor Specific Event",
            None => "Unknown Event",
        }
    }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{:02x}h), log page {:02x}h", self.name(), self.kind(), self.info(), self.page())
    }
}

impl fmt::Debug for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
