//! Log pages, and the events that point at them.

mod event;

pub use crate::wire::{Text, TooShort};
pub use event::{AsyncEvent, event_type};

use crate::Status;
use crate::wire::{Wire, bits, flags, record};

/// Log page identifiers.
pub mod id {
    /// Supported Log Pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Error Information.
    pub const ERROR: u8 = 0x01;
    /// SMART / Health Information.
    pub const HEALTH: u8 = 0x02;
    /// Firmware Slot Information.
    pub const FIRMWARE: u8 = 0x03;
    /// Changed Namespace List.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Commands Supported and Effects.
    pub const EFFECTS: u8 = 0x05;
    /// Device Self-test.
    pub const SELF_TEST: u8 = 0x06;
    /// Telemetry Host-Initiated.
    pub const TELEMETRY_HOST: u8 = 0x07;
    /// Telemetry Controller-Initiated.
    pub const TELEMETRY_CONTROLLER: u8 = 0x08;
    /// Endurance Group Information.
    pub const ENDURANCE_GROUP: u8 = 0x09;
    /// Predictable Latency Per NVM Set.
    pub const PREDICTABLE_LATENCY: u8 = 0x0a;
    /// Predictable Latency Event Aggregate.
    pub const PREDICTABLE_LATENCY_EVENTS: u8 = 0x0b;
    /// Asymmetric Namespace Access.
    pub const ANA: u8 = 0x0c;
    /// Persistent Event Log.
    pub const PERSISTENT_EVENT: u8 = 0x0d;
    /// LBA Status Information.
    pub const LBA_STATUS: u8 = 0x0e;
    /// Endurance Group Event Aggregate.
    pub const ENDURANCE_GROUP_EVENTS: u8 = 0x0f;
    /// Media Unit Status.
    pub const MEDIA_UNIT: u8 = 0x10;
    /// Supported Capacity Configuration List.
    pub const CAPACITY_CONFIGURATION: u8 = 0x11;
    /// Feature Identifiers Supported and Effects.
    pub const FEATURE_EFFECTS: u8 = 0x12;
    /// NVMe-MI Commands Supported and Effects.
    pub const MI_EFFECTS: u8 = 0x13;
    /// Command and Feature Lockdown.
    pub const LOCKDOWN: u8 = 0x14;
    /// Boot Partition.
    pub const BOOT_PARTITION: u8 = 0x15;
    /// Rotational Media Information.
    pub const ROTATIONAL: u8 = 0x16;
    /// Reservation Notification.
    pub const RESERVATION: u8 = 0x80;
    /// Sanitize Status.
    pub const SANITIZE: u8 = 0x81;
}

record! {
    /// An entry of the error information log; the latest comes first.
    ErrorEntry, ErrorEntryBuilder, 64;
    /// Which error since the controller was made; 0 for an unused entry.
    error_count 0 u64;
    /// The submission queue; FFFFh for no command.
    sqid 8 u16;
    /// The command; FFFFh for no command.
    cid 10 u16;
    /// The status and, in bit 0, the phase tag as they were posted.
    status_field 12 u16;
    /// Where the wrong parameter is: bits 7:0 byte, bits 10:8 bit; FFFFh for no parameter.
    parameter 14 u16;
    /// The first block with an error.
    lba 16 u64;
    /// The namespace.
    nsid 24 u32;
    /// A log page of the vendor's with more; 0 for none.
    vendor 28 u8;
    /// Transport type.
    trtype 29 u8;
    /// Depends on the command.
    command_specific 32 u64;
    /// Depends on the transport.
    transport_specific 40 u16;
}

impl ErrorEntry<'_> {
    /// The status of the command.
    #[must_use]
    pub fn status(&self) -> Status {
        Status(self.status_field() >> 1)
    }

    /// True if the entry reports an error.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.error_count() != 0
    }
}

impl ErrorEntryBuilder<'_> {
    /// The status of the command; clears the phase tag.
    pub fn status(self, status: Status) -> Self {
        self.status_field(status.0 << 1)
    }
}

/// The entries of an error log, the latest first, unused ones left out.
pub fn error_entries(bytes: &[u8]) -> impl Iterator<Item = ErrorEntry<'_>> {
    let (entries, _) = bytes.as_chunks();
    entries.iter().map(ErrorEntry::new).filter(ErrorEntry::is_used)
}

/// Critical warnings of the health page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct CriticalWarning(pub u8);

impl CriticalWarning {
    flags! { u8;
        /// Spare capacity is below its threshold.
        spare with_spare 0;
        /// A temperature is past its threshold.
        temperature with_temperature 1;
        /// Reliability has suffered.
        reliability with_reliability 2;
        /// All media is read-only.
        read_only with_read_only 3;
        /// The backup of volatile memory failed.
        backup with_backup 4;
        /// The persistent memory region is read-only or unreliable.
        persistent_memory with_persistent_memory 5;
    }
}

crate::wire::wire_newtypes! { CriticalWarning }

record! {
    /// SMART / Health.
    Health, HealthBuilder, 512;
    /// Critical warnings.
    critical_warning 0 CriticalWarning;
    /// Composite temperature in kelvins.
    temperature 1 u16;
    /// Spare capacity left in per cent.
    available_spare 3 u8;
    /// Spare capacity below which there is a warning, in per cent.
    spare_threshold 4 u8;
    /// Life used in per cent; may exceed 100.
    percentage_used 5 u8;
    /// Critical warnings of endurance groups.
    endurance_group_warning 6 u8;
    /// Data read in units of 1000 * 512 bytes, rounded up.
    data_units_read 32 u128;
    /// Data written in units of 1000 * 512 bytes, rounded up.
    data_units_written 48 u128;
    /// Read and compare commands.
    host_reads 64 u128;
    /// Write commands.
    host_writes 80 u128;
    /// Minutes busy with I/O.
    busy_minutes 96 u128;
    /// Power cycles.
    power_cycles 112 u128;
    /// Hours powered on.
    power_on_hours 128 u128;
    /// Shutdowns without notice.
    unsafe_shutdowns 144 u128;
    /// Data integrity errors that were not corrected.
    media_errors 160 u128;
    /// Entries of the error log over the controller's life.
    error_entries 176 u128;
    /// Minutes above the warning temperature.
    warning_minutes 192 u32;
    /// Minutes above the critical temperature.
    critical_minutes 196 u32;
    /// Times that light throttling began.
    light_throttles 216 u32;
    /// Times that heavy throttling began.
    heavy_throttles 220 u32;
    /// Seconds of light throttling.
    light_throttle_seconds 224 u32;
    /// Seconds of heavy throttling.
    heavy_throttle_seconds 228 u32;
}

/// Where the temperature sensors start.
const SENSORS: usize = 200;

impl Health<'_> {
    /// A temperature sensor, 0 to 7, in kelvins; none if there is no such sensor.
    #[must_use]
    pub fn sensor(&self, i: u8) -> Option<u16> {
        let kelvins = if i < 8 { u16::get(self.0, SENSORS + i as usize * 2) } else { 0 };
        (kelvins != 0).then_some(kelvins)
    }
}

impl HealthBuilder<'_> {
    /// A temperature sensor, 0 to 7, in kelvins; nothing past the last.
    pub fn sensor(self, i: u8, kelvins: u16) -> Self {
        if i < 8 {
            kelvins.put(self.0, SENSORS + i as usize * 2);
        }
        self
    }
}

record! {
    /// Firmware Slot Information.
    FirmwareSlots, FirmwareSlotsBuilder, 512;
    /// Active slot in bits 2:0, the slot after the next reset in bits 6:4, or 0.
    afi 0 u8;
    @text:
    /// Firmware in slot 1.
    slot1 8 8;
    /// Firmware in slot 2.
    slot2 16 8;
    /// Firmware in slot 3.
    slot3 24 8;
    /// Firmware in slot 4.
    slot4 32 8;
    /// Firmware in slot 5.
    slot5 40 8;
    /// Firmware in slot 6.
    slot6 48 8;
    /// Firmware in slot 7.
    slot7 56 8;
}

impl FirmwareSlots<'_> {
    /// The slot in use, 1 to 7.
    #[must_use]
    pub fn active(&self) -> u8 {
        self.afi() & 7
    }

    /// The slot after the next reset; none if that is not decided.
    #[must_use]
    pub fn next(&self) -> Option<u8> {
        let next = self.afi() >> 4 & 7;
        (next != 0).then_some(next)
    }
}

/// Changed Namespace List: which namespaces changed since the list was last read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed<T> {
    /// These.
    These(T),
    /// More than the list can hold.
    TooMany,
}

/// The namespaces in a Changed Namespace List.
pub fn changed_namespaces(bytes: &[u8; 4096]) -> Changed<crate::identify::ActiveNamespaces<'_>> {
    if u32::get(bytes, 0) == u32::MAX {
        return Changed::TooMany;
    }
    Changed::These(crate::identify::active_namespaces(bytes))
}

/// Writes a Changed Namespace List; more than 1024 namespaces become "too many".
pub fn put_changed(bytes: &mut [u8; 4096], nsids: impl IntoIterator<Item = u32>) {
    bytes.fill(0);
    for (i, nsid) in nsids.into_iter().enumerate() {
        if i == 1024 {
            bytes.fill(0);
            u32::MAX.put(bytes, 0);
            return;
        }
        nsid.put(bytes, i * 4);
    }
}

/// An entry of Supported Log Pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct LogSupport(pub u32);

impl LogSupport {
    bits! { u32;
        /// Depends on the log page.
        specific with_specific 16 16 u16;
    }
    flags! { u32;
        /// The log page is supported.
        supported with_supported 0;
        /// Its offset may count entries.
        index_offset with_index_offset 1;
    }
}

/// Bytes of Supported Log Pages.
pub const SUPPORTED_BYTES: usize = 1024;

/// What Supported Log Pages says about a page.
#[must_use]
pub fn log_support(bytes: &[u8; SUPPORTED_BYTES], lid: u8) -> LogSupport {
    LogSupport(u32::get(bytes, lid as usize * 4))
}

/// Writes what Supported Log Pages says about a page.
pub fn put_log_support(bytes: &mut [u8; SUPPORTED_BYTES], lid: u8, support: LogSupport) {
    support.0.put(bytes, lid as usize * 4);
}

/// Builders, for the simulator: each starts from bytes that the caller has zeroed.
pub mod build {
    pub use super::{
        ErrorEntryBuilder as ErrorEntry, FirmwareSlotsBuilder as FirmwareSlots, HealthBuilder as Health,
    };
    pub use super::{put_changed, put_log_support};
}
