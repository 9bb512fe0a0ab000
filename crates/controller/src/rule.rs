//! The rules that the controller checks, numbered for reports.

macro_rules! rules {
    ($($(#[doc = $doc:literal])* $rule:ident $code:literal $name:literal;)*) => {
        /// A rule that the driver broke. The names are those of the simulator's rules.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u32)]
        pub enum Rule {
            $($(#[doc = $doc])* $rule = $code,)*
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Rule] = &[$(Rule::$rule,)*];

            /// Its short name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Rule::$rule => $name,)* }
            }

            /// The rule with this number in a report.
            #[must_use]
            pub const fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some(Rule::$rule),)* _ => None }
            }
        }
    };
}

rules! {
    /// A doorbell was rung with a value outside the queue; detail: the value.
    DoorbellValue 1 "doorbell-value";
    /// The tail passed the head that was reported to the host; detail: the tail.
    SqOverrun 2 "sq-overrun";
    /// The head passed the entries that were posted; detail: the head.
    CqHeadPastPosted 3 "cq-head-past-posted";
    /// More commands were outstanding than the completion queue can hold; detail: the head.
    CqOverrun 4 "cq-overrun";
    /// A command identifier was used again while its command was outstanding.
    CidInUse 5 "cid-in-use";
    /// A command had the identifier FFFFh.
    CidReserved 6 "cid-reserved";
    /// An opcode that is not supported; detail: dword 0.
    Opcode 7 "opcode";
    /// Reserved bits were set; detail: the dword's index, and above it its value.
    ReservedField 8 "reserved-field";
    /// PSDT was not 00b; detail: dword 0.
    Psdt 9 "psdt";
    /// PRP1 was not aligned to a dword; detail: PRP1.
    Prp1 10 "prp1";
    /// PRP2 had a page offset, or its list pointer was not aligned; detail: PRP2.
    Prp2 11 "prp2";
    /// An entry of a PRP list had an offset; detail: the entry.
    PrpList 12 "prp-list";
    /// A transfer was longer than allowed; detail: its bytes.
    Mdts 13 "mdts";
    /// A bus address that is not mapped; detail: the address.
    DmaUnmapped 14 "dma-unmapped";
    /// A transfer that goes past the end of a mapping; detail: the address.
    DmaPastEnd 15 "dma-past-end";
    /// An entry that differs from what was submitted: its seal does not match (null controller); detail: its seal.
    Seal 16 "seal";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_rules_agree() {
        for rule in Rule::ALL {
            assert_eq!(Rule::from_code(*rule as u32), Some(*rule));
        }
        assert_eq!(Rule::from_code(0), None);
    }
}
