//! Why a page of an array is not available, or was not written back.

use crate::kernel::Answer;

/// Why a page of an array is not available, or was not written back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArrayError {
    /// The page could not be read.
    Read(Answer),
    /// A page could not be written back: the one to flush, or one that had to make room.
    WriteBack(Answer),
    /// For as long as the array's limit, every page that could have made room was pinned or in use.
    NoRoom,
    /// Another thread did not finish reading or writing the page within the array's limit.
    TimedOut,
    /// The page has as many pins as can be counted.
    TooManyPins,
    /// The array ends before this page or row.
    Range,
    /// The array was opened for reading only.
    ReadOnly,
    /// This is not an array, or one of another version.
    NoArray,
}

/// Added to the number of a write-back's answer.
const WRITE_BACK: i32 = 0x1_0000;

impl ArrayError {
    /// The number: never 0, which stands for success. Read errors have their answer's.
    #[inline(always)]
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Read(answer) => answer.code(),
            Self::WriteBack(answer) => WRITE_BACK + answer.code(),
            Self::NoRoom => -50,
            Self::TimedOut => -51,
            Self::TooManyPins => -52,
            Self::Range => -53,
            Self::ReadOnly => -54,
            Self::NoArray => -55,
        }
    }

    /// The error with this number, if it is one of these.
    #[must_use]
    pub const fn from_code(code: i32) -> Option<Self> {
        match code {
            -50 => Some(Self::NoRoom),
            -51 => Some(Self::TimedOut),
            -52 => Some(Self::TooManyPins),
            -53 => Some(Self::Range),
            -54 => Some(Self::ReadOnly),
            -55 => Some(Self::NoArray),
            _ => match (Answer::from_code(code), Answer::from_code(code.wrapping_sub(WRITE_BACK))) {
                (Some(Answer::Done), _) | (None, Some(Answer::Done) | None) => None,
                (Some(answer), _) => Some(Self::Read(answer)),
                (None, Some(answer)) => Some(Self::WriteBack(answer)),
            },
        }
    }
}

impl core::fmt::Display for ArrayError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Read(answer) => return write!(f, "the page could not be read: {answer}"),
            Self::WriteBack(answer) => return write!(f, "a page could not be written back: {answer}"),
            Self::NoRoom => "every page of the cache that could make room was pinned or in use for too long",
            Self::TimedOut => "another thread had the page in use for too long",
            Self::TooManyPins => "the page has too many pins",
            Self::Range => "the array ends before it",
            Self::ReadOnly => "the array was opened for reading only",
            Self::NoArray => "this is not a handle of an array, or one of another version",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;
    use std::string::ToString;

    #[test]
    fn every_error_has_a_number_and_words_of_its_own() {
        let answers = (-13..=0x7fff).filter_map(Answer::from_code).filter(|answer| *answer != Answer::Done);
        let own = [
            ArrayError::NoRoom,
            ArrayError::TimedOut,
            ArrayError::TooManyPins,
            ArrayError::Range,
            ArrayError::ReadOnly,
            ArrayError::NoArray,
        ];
        let (mut numbers, mut count) = (std::collections::BTreeSet::new(), 0);
        for error in answers.flat_map(|a| [ArrayError::Read(a), ArrayError::WriteBack(a)]).chain(own) {
            assert_eq!(ArrayError::from_code(error.code()), Some(error));
            assert!(error.code() != 0 && numbers.insert(error.code()) && !error.to_string().is_empty());
            count += 1;
        }
        assert_eq!((numbers.len(), count), (2 * (13 + 0x7fff) + 6, 2 * (13 + 0x7fff) + 6));
        assert_eq!(ArrayError::from_code(0), None);
        assert_eq!(ArrayError::from_code(0x1_0000), None);
        assert_eq!(ArrayError::Read(Answer::Failed(Status(0x281))).code(), 0x281);
    }
}
