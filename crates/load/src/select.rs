//! Which tensors are wanted, and which part of each: names, types, and the slice of a rank of a tensor-parallel group.

use wildmatch::WildMatch;

use crate::dtype::Dtype;
use crate::formats::TensorInfo;
use crate::plan::Error;

/// What is wanted of a model. The default is everything, whole.
///
/// Patterns are names in which `*` stands for any text and `?` for any one character.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    only: Vec<WildMatch>,
    except: Vec<WildMatch>,
    dtypes: Vec<Dtype>,
    cuts: Vec<(WildMatch, usize)>,
    group: Option<(u64, u64)>,
}

impl Selection {
    /// Tensors of this name too; without any such call all names are wanted.
    #[must_use]
    pub fn only(mut self, pattern: &str) -> Self {
        self.only.push(WildMatch::new(pattern));
        self
    }

    /// No tensor of this name, whatever `only` says.
    #[must_use]
    pub fn except(mut self, pattern: &str) -> Self {
        self.except.push(WildMatch::new(pattern));
        self
    }

    /// Tensors of this type too; without any such call all types are wanted.
    #[must_use]
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtypes.push(dtype);
        self
    }

    /// Tensors of this name are cut along dimension `dim`, the first pattern that fits deciding; all others are
    /// wanted whole by every rank.
    #[must_use]
    pub fn cut(mut self, pattern: &str, dim: usize) -> Self {
        self.cuts.push((WildMatch::new(pattern), dim));
        self
    }

    /// What is cut is cut into `ranks` equal parts, and part `rank` is wanted.
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

    /// Whether the tensor is wanted at all.
    #[must_use]
    pub fn wants(&self, tensor: &TensorInfo) -> bool {
        let any = |patterns: &[WildMatch]| patterns.iter().any(|p| p.matches(&tensor.name));
        (self.only.is_empty() || any(&self.only))
            && !any(&self.except)
            && (self.dtypes.is_empty() || self.dtypes.contains(&tensor.dtype))
    }

    /// What is wanted of a tensor that is.
    ///
    /// # Errors
    /// When it cannot be cut as asked.
    pub fn part(&self, tensor: &TensorInfo) -> Result<Part, Error> {
        let cut = self.cuts.iter().find(|(pattern, _)| pattern.matches(&tensor.name));
        match (cut, self.group) {
            (Some((_, dim)), Some((rank, ranks))) if ranks > 1 => Part::cut(tensor, *dim, rank, ranks),
            _ => Ok(Part::whole(tensor)),
        }
    }
}

/// The bytes that are wanted of a tensor: rows of one length, at equal distances in the file, packed in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The dimensions of the part.
    pub shape: Vec<u64>,
    /// Where its first row is in the file.
    pub offset: u64,
    /// Bytes of a row.
    pub row: u64,
    /// How many rows there are.
    pub rows: u64,
    /// From the start of a row to that of the next, in the file.
    pub step: u64,
}

impl Part {
    /// All of it.
    #[must_use]
    pub fn whole(tensor: &TensorInfo) -> Self {
        let TensorInfo { shape, offset, bytes, .. } = tensor;
        Self { shape: shape.clone(), offset: *offset, row: *bytes, rows: 1, step: *bytes }
    }

    /// Part `rank` of `ranks` equal ones along dimension `dim`.
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

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.row * self.rows
    }
}
