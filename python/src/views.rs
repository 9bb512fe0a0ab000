//! Where the tensors of an arena lie, so that a framework makes all of them by a few calls of its own: for each type a list of
//! shapes that lie one behind the other, gaps between tensors included.

use std::collections::HashMap;

use onehop_load::plan::Placed;
use onehop_load::{Dtype, Plan, TensorInfo};

use crate::dtype::{carried, data_type};

/// The tensors of one type: the type, the bytes of an element, the shapes that there are, which of them comes when, and
/// the tensor's name, or None for a gap.
pub(crate) type Group = (&'static str, u64, Vec<Vec<u64>>, Vec<usize>, Vec<Option<String>>);

/// The tensors without bytes: name, type and shape.
pub(crate) type Empty = (String, &'static str, Vec<u64>);

#[derive(Default)]
struct Shapes {
    all: Vec<Vec<u64>>,
    places: HashMap<Vec<u64>, usize>,
    order: Vec<usize>,
    names: Vec<Option<String>>,
    /// Bytes so far.
    end: u64,
}

impl Shapes {
    fn push(&mut self, shape: Vec<u64>, name: Option<String>) {
        let next = self.all.len();
        let place = *self.places.entry(shape).or_insert_with_key(|shape| {
            self.all.push(shape.clone());
            next
        });
        self.order.push(place);
        self.names.push(name);
    }
}

/// The layout of a plan's arena.
pub(crate) fn layout(plan: &Plan) -> (Vec<Group>, Vec<Empty>) {
    let mut placed: Vec<&Placed> = plan.tensors.iter().collect();
    placed.sort_unstable_by_key(|tensor| tensor.at);
    let mut groups: Vec<(Dtype, Shapes)> = Vec::new();
    let mut empty = Vec::new();
    for Placed { name, dtype, shape, at, bytes, .. } in placed {
        let info =
            TensorInfo { name: name.clone(), dtype: *dtype, shape: shape.clone(), offset: 0, bytes: *bytes };
        let shape = carried(&info).shape;
        if *bytes == 0 {
            empty.push((info.name, dtype.name(), shape));
            continue;
        }
        let group = match groups.iter().position(|(other, _)| other == dtype) {
            Some(group) => group,
            None => {
                groups.push((*dtype, Shapes::default()));
                groups.len() - 1
            }
        };
        let Some((_, shapes)) = groups.get_mut(group) else { continue };
        if *at > shapes.end {
            shapes.push(vec![(at - shapes.end) / width(*dtype)], None);
        }
        shapes.push(shape, Some(info.name));
        shapes.end = at + bytes;
    }
    let group = |(dtype, Shapes { all, order, names, .. }): (Dtype, Shapes)| {
        (dtype.name(), width(dtype), all, order, names)
    };
    (groups.into_iter().map(group).collect(), empty)
}

/// Bytes of an element as it is given away. What a tensor starts at is a multiple of it.
fn width(dtype: Dtype) -> u64 {
    u64::from(data_type(dtype).bits / 8)
}
