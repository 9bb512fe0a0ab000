//! Features: their identifiers, and the values of those that we set or read.

use crate::BusAddr;
use crate::wire::{bits, flags};

/// Feature identifiers.
pub mod id {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// LBA Range Type.
    pub const LBA_RANGE: u8 = 0x03;
    /// Temperature Threshold.
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    /// Error Recovery.
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Volatile Write Cache.
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    /// Number of Queues.
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    /// Interrupt Coalescing.
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    /// Interrupt Vector Configuration.
    pub const INTERRUPT_VECTOR: u8 = 0x09;
    /// Write Atomicity Normal.
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    /// Asynchronous Event Configuration.
    pub const ASYNC_EVENT: u8 = 0x0b;
    /// Autonomous Power State Transition.
    pub const APST: u8 = 0x0c;
    /// Host Memory Buffer.
    pub const HOST_MEMORY_BUFFER: u8 = 0x0d;
    /// Timestamp.
    pub const TIMESTAMP: u8 = 0x0e;
    /// Keep Alive Timer.
    pub const KEEP_ALIVE: u8 = 0x0f;
    /// Host Controlled Thermal Management.
    pub const THERMAL_MANAGEMENT: u8 = 0x10;
    /// Non-Operational Power State Config.
    pub const NON_OPERATIONAL_POWER: u8 = 0x11;
    /// Read Recovery Level Config.
    pub const READ_RECOVERY_LEVEL: u8 = 0x12;
    /// Predictable Latency Mode Config.
    pub const PREDICTABLE_LATENCY_CONFIG: u8 = 0x13;
    /// Predictable Latency Mode Window.
    pub const PREDICTABLE_LATENCY_WINDOW: u8 = 0x14;
    /// LBA Status Information Report Interval.
    pub const LBA_STATUS_INTERVAL: u8 = 0x15;
    /// Host Behavior Support.
    pub const HOST_BEHAVIOR: u8 = 0x16;
    /// Sanitize Config.
    pub const SANITIZE: u8 = 0x17;
    /// Endurance Group Event Configuration.
    pub const ENDURANCE_GROUP_EVENT: u8 = 0x18;
    /// I/O Command Set Profile.
    pub const COMMAND_SET_PROFILE: u8 = 0x19;
    /// Spinup Control.
    pub const SPINUP: u8 = 0x1a;
    /// Software Progress Marker.
    pub const SOFTWARE_PROGRESS: u8 = 0x80;
    /// Host Identifier.
    pub const HOST_ID: u8 = 0x81;
    /// Reservation Notification Mask.
    pub const RESERVATION_MASK: u8 = 0x82;
    /// Reservation Persistence.
    pub const RESERVATION_PERSISTENCE: u8 = 0x83;
    /// Namespace Write Protection Config.
    pub const WRITE_PROTECTION: u8 = 0x84;
}

/// Number of Queues: dword 11 when asking, the result when granted. The grant may be more or less than asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Queues(pub u32);

impl Queues {
    bits! { u32;
        /// I/O submission queues, zero-based.
        sqs_z with_sqs_z 0 16 u16;
        /// I/O completion queues, zero-based.
        cqs_z with_cqs_z 16 16 u16;
    }

    /// This many of each, limited to 1 to 65535.
    #[must_use]
    pub const fn ask(sqs: u32, cqs: u32) -> Self {
        Self(0).with_sqs_z(zero_based(sqs)).with_cqs_z(zero_based(cqs))
    }

    /// I/O submission queues.
    #[must_use]
    pub const fn sqs(self) -> u32 {
        self.sqs_z() as u32 + 1
    }

    /// I/O completion queues.
    #[must_use]
    pub const fn cqs(self) -> u32 {
        self.cqs_z() as u32 + 1
    }
}

/// A count of 1 to 65535 less one; 65536 would be the reserved value FFFFh.
const fn zero_based(count: u32) -> u16 {
    if count == 0 {
        0
    } else if count > 0xffff {
        0xfffe
    } else {
        (count - 1) as u16
    }
}

/// Arbitration: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Arbitration(pub u32);

impl Arbitration {
    bits! { u32;
        /// Power of two of the commands taken from a queue at a time; 7 means no limit.
        burst with_burst 0 3 u8;
        /// Weight of the low class, zero-based.
        low_z with_low_z 8 8 u8;
        /// Weight of the medium class, zero-based.
        medium_z with_medium_z 16 8 u8;
        /// Weight of the high class, zero-based.
        high_z with_high_z 24 8 u8;
    }
}

/// Power Management: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct PowerManagement(pub u32);

impl PowerManagement {
    bits! { u32;
        /// The power state.
        ps with_ps 0 5 u8;
        /// A hint at the workload.
        wh with_wh 5 3 u8;
    }
}

/// Temperature Threshold: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct TemperatureThreshold(pub u32);

impl TemperatureThreshold {
    bits! { u32;
        /// The threshold in kelvins.
        kelvins with_kelvins 0 16 u16;
        /// The sensor: 0 composite, 1 to 8, 15 all.
        sensor with_sensor 16 4 u8;
        /// 0 too hot, 1 too cold.
        kind with_kind 20 2 u8;
    }
}

/// Error Recovery: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct ErrorRecovery(pub u32);

impl ErrorRecovery {
    bits! { u32;
        /// Time limit of retries in units of 100 ms; 0 for none.
        tler with_tler 0 16 u16;
    }
    flags! { u32;
        /// Reading a deallocated block is an error.
        dulbe with_dulbe 16;
    }
}

/// Volatile Write Cache: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct WriteCache(pub u32);

impl WriteCache {
    flags! { u32;
        /// The cache is on.
        wce with_wce 0;
    }
}

/// Interrupt Coalescing: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Coalescing(pub u32);

impl Coalescing {
    bits! { u32;
        /// Completions before an interrupt, zero-based.
        threshold_z with_threshold_z 0 8 u8;
        /// Longest delay in units of 100 us; 0 for none.
        time with_time 8 8 u8;
    }
}

/// Interrupt Vector Configuration: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct VectorConfig(pub u32);

impl VectorConfig {
    bits! { u32;
        /// The vector.
        vector with_vector 0 16 u16;
    }
    flags! { u32;
        /// Coalescing is off for it.
        no_coalescing with_no_coalescing 16;
    }
}

/// Asynchronous Event Configuration: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct EventConfig(pub u32);

impl EventConfig {
    bits! { u32;
        /// Critical warnings of the health page that cause an event, bit by bit.
        critical with_critical 0 8 u8;
    }
    flags! { u32;
        /// Namespace attributes changed.
        namespace with_namespace 8;
        /// A firmware activation starts.
        firmware with_firmware 9;
        /// The telemetry log changed.
        telemetry with_telemetry 10;
        /// Asymmetric access changed.
        ana with_ana 11;
        /// The predictable latency log changed.
        predictable_latency with_predictable_latency 12;
        /// LBA status information is there.
        lba_status with_lba_status 13;
        /// The endurance group log changed.
        endurance_group with_endurance_group 14;
        /// The subsystem shuts down normally.
        shutdown with_shutdown 15;
    }
}

/// Host Controlled Thermal Management: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct ThermalManagement(pub u32);

impl ThermalManagement {
    bits! { u32;
        /// Heavy throttling starts here, in kelvins; 0 is off.
        tmt2 with_tmt2 0 16 u16;
        /// Light throttling starts here, in kelvins; 0 is off.
        tmt1 with_tmt1 16 16 u16;
    }
}

/// Non-Operational Power State Config: dword 11.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct NonOperational(pub u32);

impl NonOperational {
    flags! { u32;
        /// Background work may use more power than the state allows.
        permissive with_permissive 0;
    }
}

/// Autonomous Power State Transition: dword 11; the data is a table of 32 qwords.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Apst(pub u32);

impl Apst {
    /// Off: best latency.
    pub const OFF: Self = Self(0);
    /// Bytes of the table.
    pub const TABLE_BYTES: usize = 256;
    /// The table for the value off.
    pub const OFF_TABLE: [u8; 256] = [0; 256];

    flags! { u32;
        /// The controller changes power states by itself.
        enabled with_enabled 0;
    }
}

/// Host Memory Buffer: the five dwords of Set Features. The sizes are in pages of CC.MPS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostMemory {
    /// Enable the buffer; else disable it.
    pub enable: bool,
    /// The controller gets back the memory that it had before, unchanged.
    pub memory_return: bool,
    /// Pages in all.
    pub pages: u32,
    /// The descriptor list; 16-byte aligned.
    pub list: BusAddr,
    /// Entries of the list.
    pub entries: u32,
}

impl HostMemory {
    /// Dwords 11 to 15 of Set Features.
    #[must_use]
    pub const fn encode(&self) -> [u32; 5] {
        let dw11 = self.enable as u32 | (self.memory_return as u32) << 1;
        [dw11, self.pages, self.list.0 as u32 & !0xf, (self.list.0 >> 32) as u32, self.entries]
    }

    /// From dwords 11 to 15.
    #[must_use]
    pub const fn decode(dw: &[u32; 5]) -> Self {
        Self {
            enable: dw[0] & 1 != 0,
            memory_return: dw[0] & 2 != 0,
            pages: dw[1],
            list: BusAddr((dw[2] & !0xf) as u64 | (dw[3] as u64) << 32),
            entries: dw[4],
        }
    }

    /// The command that enables or disables the buffer.
    #[must_use]
    pub const fn command(&self) -> crate::Sqe {
        let [dw11, dw12, dw13, dw14, dw15] = self.encode();
        crate::admin::set_features(id::HOST_MEMORY_BUFFER, false, dw11)
            .with_dw(12, dw12)
            .with_dw(13, dw13)
            .with_dw(14, dw14)
            .with_dw(15, dw15)
    }
}

/// One entry of the host memory buffer's descriptor list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostMemoryEntry {
    /// A page-aligned address.
    pub at: BusAddr,
    /// Pages of CC.MPS.
    pub pages: u32,
}

impl HostMemoryEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 16;

    /// The entry as it travels.
    #[must_use]
    pub const fn encode(&self) -> [u8; 16] {
        (self.at.0 as u128 | (self.pages as u128) << 64).to_le_bytes()
    }

    /// An entry from its bytes.
    #[must_use]
    pub const fn decode(bytes: &[u8; 16]) -> Self {
        let all = u128::from_le_bytes(*bytes);
        Self { at: BusAddr(all as u64), pages: (all >> 64) as u32 }
    }
}

/// Timestamp: milliseconds since 1970 in 8 bytes; the upper two bytes are its origin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    bits! { u64;
        /// Milliseconds since 1970, or since the reset.
        millis with_millis 0 48 u64;
        /// 0 counted from a reset, 1 set by the host.
        origin with_origin 49 3 u8;
    }
    flags! { u64;
        /// The clock stood still at times.
        stopped with_stopped 48;
    }
}

/// Host Behavior Support: the first bytes of its 512-byte buffer.
pub mod behavior {
    /// Bytes of the buffer.
    pub const BYTES: usize = 512;
    /// Byte: advanced command retry, so that CRD may be nonzero.
    pub const ACRE: usize = 0;
    /// Byte: extended telemetry.
    pub const ETDAS: usize = 1;
    /// Byte: LBA formats above 16 and extended protection information.
    pub const LBAFEE: usize = 2;
}
