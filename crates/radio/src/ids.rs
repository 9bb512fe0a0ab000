//! PCI IDs of boards. Those of real boards belong to their makers; these are what the published driver binds to.

/// Vendor and device IDs of boards with this engine.
pub const BOARDS: [(u16, u16); 9] = [
    (0x10ee, 0x7031),
    (0x10ee, 0x7032),
    (0x10ee, 0x7044),
    (0x10ee, 0x7045),
    (0x10ee, 0x7046),
    (0x10ee, 0x7049),
    (0x10ee, 0x9034),
    (0x10ee, 0x9044),
    (0x10ee, 0x7071),
];

/// Subsystem IDs of the simulated board; no maker has that vendor ID.
pub const SIMULATED: (u16, u16) = (0x1234, 0x0e5d);
