//! The layout of tensors in an arena, from which a framework makes all of them by few calls.
//!
//! Tensors of one type and one shape often have equal distances: the experts of a layer, the layers of a model. Such a
//! series is one view with an extra dimension, from which one call makes all of its tensors.

use std::collections::HashMap;

use onehop_load::plan::Placed;
use onehop_load::{Dtype, Plan, TensorInfo};

use crate::dtype::{data_type, exported};

/// Tensors of one type and one shape at equal distances: the type, the shape, the start of the first and the distance
/// to the next, in elements; and the names.
pub(crate) type TensorSeries = (&'static str, Vec<u64>, u64, u64, Vec<String>);

/// The series of a plan's arena. Empty tensors are at its start.
pub(crate) fn layout(plan: &Plan) -> Vec<TensorSeries> {
    let mut alike: HashMap<(Dtype, Vec<u64>), Vec<&Placed>> = HashMap::new();
    let mut order = Vec::new();
    for placed in &plan.tensors {
        let Placed { dtype, shape, bytes, .. } = placed;
        let info =
            TensorInfo { name: String::new(), dtype: *dtype, shape: shape.clone(), offset: 0, bytes: *bytes };
        let key = (*dtype, exported(&info).shape);
        alike
            .entry(key)
            .or_insert_with_key(|key| {
                order.push(key.clone());
                Vec::new()
            })
            .push(placed);
    }
    let mut all = Vec::new();
    for key in order {
        let mut placed = alike.remove(&key).unwrap_or_default();
        placed.sort_unstable_by_key(|tensor| tensor.at);
        let (dtype, shape) = key;
        let mut rest = placed.as_slice();
        while let Some((first, step, taken)) = series(rest) {
            let width = u64::from(data_type(dtype).bits / 8);
            let (names, left) = rest.split_at(taken);
            let names = names.iter().map(|tensor| tensor.name.clone()).collect();
            all.push((dtype.name(), shape.clone(), first / width, step / width, names));
            rest = left;
        }
    }
    all
}

/// The start of the first of these, the distance to the next, and how many have that distance.
fn series(placed: &[&Placed]) -> Option<(u64, u64, usize)> {
    let first = placed.first()?.at;
    let step = placed.get(1).map_or(0, |second| second.at - first);
    let taken = (0u64..).zip(placed).take_while(|(i, tensor)| tensor.at == first + i * step).count();
    Some((first, step, taken))
}
