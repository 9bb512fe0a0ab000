//! By which numbers boards are known on the PCI bus. What a real board has there is its maker's; these are what its published
//! driver binds to.

/// Vendor and device of the boards with this engine.
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

/// Vendor and device of the subsystem by which the simulated board says that it is one: no maker has that vendor's number.
pub const SIMULATED: (u16, u16) = (0x1234, 0x0e5d);
