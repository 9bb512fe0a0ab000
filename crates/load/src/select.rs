//! Selects tensors, and parts of them: names, types, and a rank's slice in a tensor-parallel group.

use std::fmt;
use std::ops::Range;

use crate::dtype::Dtype;
use crate::formats::TensorInfo;
use crate::model::Tensor;
use crate::names::NamePatterns;
use crate::plan::Error;

/// Selects tensors of a model. The default is all of them, whole.
///
/// Patterns are names in which `*` stands for any text and `?` for any one character. Each must match a tensor of the
/// model.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    only: Vec<String>,
    except: Vec<String>,
    dtypes: Vec<Dtype>,
    cuts: Vec<String>,
    /// The dimension of each cut.
    dims: Vec<usize>,
    group: Option<(u64, u64)>,
}

impl Selection {
    /// Adds tensors of this name; without any such call all names are selected.
    #[must_use]
    pub fn only(mut self, pattern: &str) -> Self {
        self.only.push(pattern.into());
        self
    }

    /// Excludes tensors of this name, even if `only` includes them.
    #[must_use]
    pub fn except(mut self, pattern: &str) -> Self {
        self.except.push(pattern.into());
        self
    }

    /// Adds tensors of this type; without any such call all types are selected.
    #[must_use]
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtypes.push(dtype);
        self
    }

    /// Slices tensors of this name along dimension `dim`; the first matching pattern decides. Every rank gets all other
    /// tensors whole.
    #[must_use]
    pub fn cut(mut self, pattern: &str, dim: usize) -> Self {
        self.cuts.push(pattern.into());
        self.dims.push(dim);
        self
    }

    /// Selects part `rank` of `ranks` equal parts of each sliced tensor.
    ///
    /// # Errors
    /// When there is no such part.
    pub fn rank(mut self, rank: u64, ranks: u64) -> Result<Self, Error> {
        if rank >= ranks {
            return Err(Error::Rank { rank, ranks });
        }
        self.group = Some((rank, ranks));
        Ok(self)
    }

    /// The same with its patterns parsed, ready to match tensors.
    #[must_use]
    pub fn selector(&self) -> Selector<'_> {
        Selector {
            only: NamePatterns::new(&self.only),
            except: NamePatterns::new(&self.except),
            cuts: NamePatterns::new(&self.cuts),
            selection: self,
        }
    }
}

/// A [`Selection`] with parsed patterns.
pub struct Selector<'a> {
    only: NamePatterns<'a>,
    except: NamePatterns<'a>,
    cuts: NamePatterns<'a>,
    selection: &'a Selection,
}

impl Selector<'_> {
    /// Checks that each pattern matches a tensor of the model, and that the selection is not empty unless the model is.
    ///
    /// # Errors
    /// When it does not: a mistyped name would load too much or too little.
    pub fn check(&self, tensors: &[Tensor]) -> Result<(), Error> {
        let uses = [(&self.only, Use::Load), (&self.except, Use::LeaveOut), (&self.cuts, Use::Cut)];
        for (patterns, used) in uses.into_iter().filter(|(patterns, _)| !patterns.is_empty()) {
            if let Some(pattern) = patterns.unmatched(tensors.iter().map(|t| t.info.name.as_str())) {
                return Err(Error::NoMatch { pattern: pattern.into(), used });
            }
        }
        if !tensors.is_empty() && !tensors.iter().any(|tensor| self.wants(&tensor.info)) {
            return Err(Error::NothingLeft);
        }
        Ok(())
    }

    /// Whether the tensor is selected.
    #[must_use]
    pub fn wants(&self, tensor: &TensorInfo) -> bool {
        let dtypes = &self.selection.dtypes;
        (self.only.is_empty() || self.only.any(&tensor.name))
            && !self.except.any(&tensor.name)
            && (dtypes.is_empty() || dtypes.contains(&tensor.dtype))
    }

    /// The selected part of a tensor.
    ///
    /// # Errors
    /// When it cannot be sliced as requested.
    pub fn part(&self, tensor: &TensorInfo) -> Result<Part, Error> {
        let Some((rank, ranks)) = self.selection.group.filter(|(_, ranks)| *ranks > 1) else {
            return Ok(Part::whole(tensor));
        };
        let cut = self.cuts.first(&tensor.name).and_then(|place| self.selection.dims.get(place));
        cut.map_or_else(|| Ok(Part::whole(tensor)), |dim| Part::cut(tensor, *dim, rank, ranks))
    }
}

/// The purpose of a pattern.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Tensors to load.
    Load,
    /// Tensors to exclude.
    LeaveOut,
    /// Tensors to slice.
    Cut,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Load => "to be loaded",
            Self::LeaveOut => "to be left out",
            Self::Cut => "to be cut",
        })
    }
}

/// The selected bytes of a tensor: rows of equal length and distance in the file, packed in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dimensions of the part.
    pub shape: Vec<u64>,
    /// Offset of its first row in the file.
    pub offset: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Number of rows.
    pub rows: u64,
    /// Distance between the starts of two rows in the file.
    pub step: u64,
}

impl Part {
    /// The whole tensor.
    #[must_use]
    pub fn whole(tensor: &TensorInfo) -> Self {
        let TensorInfo { shape, offset, bytes, .. } = tensor;
        Self { shape: shape.clone(), offset: *offset, row: *bytes, rows: 1, step: *bytes }
    }

    /// Part `rank` of `ranks` equal parts along dimension `dim`.
    fn cut(tensor: &TensorInfo, dim: usize, rank: u64, ranks: u64) -> Result<Self, Error> {
        let name = || tensor.name.clone();
        let Some(&length) = tensor.shape.get(dim) else {
            return Err(Error::Dimension { tensor: name(), dim, rank: tensor.shape.len() });
        };
        if !length.is_multiple_of(ranks) {
            return Err(Error::Uneven { tensor: name(), dim, length, ranks });
        }
        let mut shape = tensor.shape.clone();
        shape.iter_mut().skip(dim).take(1).for_each(|d| *d = length / ranks);
        if tensor.bytes == 0 {
            return Ok(Self { shape, ..Self::whole(tensor) });
        }
        // None of these overflows: no factor is zero, and the whole tensor has a size.
        let outer: u64 = tensor.shape.iter().take(dim).product();
        let inner: u64 = tensor.shape.iter().skip(dim + 1).product();
        let row = tensor.dtype.bytes(length / ranks * inner).map_err(|_| Error::WithinBlock {
            tensor: name(),
            dim,
            ranks,
            dtype: tensor.dtype,
        })?;
        let offset = tensor.offset + row * rank;
        Ok(Self { shape, offset, row, rows: outer, step: row * ranks })
    }

    /// The smallest part that contains these indices, a range for each dimension. It is exact if at most two dimensions
    /// are sliced, apart from leading ones with a single index; a third sliced dimension is included whole, as
    /// [`Part::shape`] says.
    ///
    /// # Errors
    /// When the ranges do not match the tensor's dimensions, or slice within a byte or a block of a quantised type.
    pub fn within(tensor: &TensorInfo, ranges: &[Range<u64>]) -> Result<Self, Error> {
        let lies_within =
            |(range, length): (&Range<u64>, &u64)| range.start <= range.end && range.end <= *length;
        if ranges.len() != tensor.shape.len() || !ranges.iter().zip(&tensor.shape).all(lies_within) {
            return Err(Error::Indices { tensor: tensor.name.clone(), shape: tensor.shape.clone() });
        }
        let length = |range: &Range<u64>| range.end - range.start;
        if ranges.iter().any(|range| length(range) == 0) {
            let shape = ranges.iter().map(length).collect();
            return Ok(Self { shape, offset: tensor.offset, row: 0, rows: 1, step: 0 });
        }
        // None of these overflows: no range is longer than its dimension, no dimension is zero, and the tensor has a
        // size.
        let inner = |dim: usize| tensor.shape.iter().skip(dim + 1).product::<u64>();
        let last = ranges.len().saturating_sub(1);
        let outer = ranges.iter().position(|range| length(range) != 1).unwrap_or(last);
        let is_cut = |dim: &usize| ranges.get(*dim).map(length) != tensor.shape.get(*dim).copied();
        let cut = (outer + 1..ranges.len()).find(is_cut).unwrap_or(outer);
        let mut shape = tensor.shape.clone();
        let mut first = 0;
        for (dim, (size, range)) in shape.iter_mut().zip(ranges).enumerate().take(cut + 1) {
            first += range.start * inner(dim);
            *size = length(range);
        }
        let bytes = |elements: u64| {
            let within = |_| Error::Block { tensor: tensor.name.clone(), dtype: tensor.dtype };
            tensor.dtype.bytes(elements).map_err(within)
        };
        let rows = shape.iter().take(cut).product();
        let row = bytes(shape.iter().skip(cut).product())?;
        let step = if rows == 1 { row } else { bytes(inner(cut.saturating_sub(1)))? };
        Ok(Self { shape, offset: tensor.offset + bytes(first)?, row, rows, step })
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.row * self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    /// The elements of a box, each of which is its own number in a tensor of bytes.
    fn elements(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
        let mut all = vec![0];
        for (dim, range) in ranges.iter().enumerate() {
            let inner: u64 = shape[dim + 1..].iter().product();
            all = all.iter().flat_map(|at| range.clone().map(move |i| at + i * inner)).collect();
        }
        all
    }

    #[test]
    fn a_part_holds_the_indices_and_nothing_else_of_the_first_two_cuts() {
        let shape = [3, 4, 2, 3];
        let tensor =
            |dtype, bytes| TensorInfo { name: "t".into(), dtype, shape: shape.to_vec(), offset: 100, bytes };
        let (bytes, nibbles) = (tensor(Dtype::U8, 72), tensor(Dtype::F4, 36));
        let ranges = |dim: usize| (0..=shape[dim]).flat_map(move |a| (a..=shape[dim]).map(move |b| a..b));
        let mut count = 0;
        for a in ranges(0) {
            for (b, c, d) in ranges(1)
                .flat_map(|b| ranges(2).map(move |c| (b.clone(), c)))
                .flat_map(|(b, c)| ranges(3).map(move |d| (b.clone(), c.clone(), d)))
            {
                let wanted = [a.clone(), b, c, d];
                let part = Part::within(&bytes, &wanted).unwrap();
                // A dimension of the part that is longer than requested is complete.
                let held: Vec<_> = (wanted.iter().zip(part.shape.iter().zip(&shape)))
                    .map(|(w, (has, all))| if *has == w.end - w.start { w.clone() } else { 0..*all })
                    .collect();
                let rows = (0..part.rows).flat_map(|i| {
                    let first = part.offset - 100 + i * part.step;
                    first..first + part.row
                });
                assert_eq!(rows.collect::<Vec<_>>(), elements(&shape, &held), "{wanted:?}");
                let cuts = wanted.iter().zip(&shape).skip_while(|(w, _)| w.end - w.start == 1);
                if cuts.skip(1).filter(|(w, all)| w.end - w.start != **all).count() < 2 {
                    assert_eq!(held, wanted);
                }
                if let Ok(half) = Part::within(&nibbles, &wanted) {
                    assert_eq!((half.row * 2, half.rows, &half.shape), (part.row, part.rows, &part.shape));
                }
                count += 1;
            }
        }
        assert_eq!(count, 10 * 15 * 6 * 10);
        let backwards = Range { start: 2, end: 1 };
        for bad in [vec![0..1; 3], vec![0..3, 0..5, 0..2, 0..3], vec![backwards, 0..4, 0..2, 0..3]] {
            assert!(matches!(Part::within(&bytes, &bad), Err(Error::Indices { .. })), "{bad:?}");
        }
        assert!(matches!(Part::within(&nibbles, &[0..3, 0..4, 0..2, 1..2]), Err(Error::Block { .. })));
        let scalar = TensorInfo { shape: vec![], bytes: 1, ..bytes };
        assert_eq!(Part::within(&scalar, &[]).unwrap(), Part::whole(&scalar));
    }
}
