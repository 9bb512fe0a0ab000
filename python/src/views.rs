//! Where the tensors of an arena lie, so that a framework makes all of them by few calls of its own.
//!
//! Tensors of one type and one shape often come at equal distances: the experts of a layer, the layers of a model. Such a
//! row is one view with a dimension more, and all of its tensors are made of that by one call.

use std::collections::HashMap;

use onehop_load::plan::Placed;
use onehop_load::{Dtype, Plan, TensorInfo};

use crate::dtype::{carried, data_type};

/// Tensors of one type and one shape at equal distances: the type, the shape, where the first one starts and how far it is
/// to the next, in elements; and the names.
pub(crate) type TensorSeries = (&'static str, Vec<u64>, u64, u64, Vec<String>);

/// The rows of a plan's arena. Tensors without bytes are at its start.
pub(crate) fn layout(plan: &Plan) -> Vec<TensorSeries> {
    let mut alike: HashMap<(Dtype, Vec<u64>), Vec<&Placed>> = HashMap::new();
    let mut order = Vec::new();
    for placed in &plan.tensors {
        let Placed { dtype, shape, bytes, .. } = placed;
        let info =
            TensorInfo { name: String::new(), dtype: *dtype, shape: shape.clone(), offset: 0, bytes: *bytes };
        let key = (*dtype, carried(&info).shape);
        alike
            .entry(key)
            .or_insert_with_key(|key| {
                order.push(key.clone());
                Vec::new()
            })
            .push(placed);
    }
    let mut rows = Vec::new();
    for key in order {
        let mut placed = alike.remove(&key).unwrap_or_default();
        placed.sort_unstable_by_key(|tensor| tensor.at);
        let (dtype, shape) = key;
        let mut rest = placed.as_slice();
        while let Some((first, step, taken)) = row(rest) {
            let width = u64::from(data_type(dtype).bits / 8);
            let (names, left) = rest.split_at(taken);
            let names = names.iter().map(|tensor| tensor.name.clone()).collect();
            rows.push((dtype.name(), shape.clone(), first / width, step / width, names));
            rest = left;
        }
    }
    rows
}

/// Where the first of these starts, how far it is to the next, and how many go on at that distance.
fn row(placed: &[&Placed]) -> Option<(u64, u64, usize)> {
    let first = placed.first()?.at;
    let step = placed.get(1).map_or(0, |second| second.at - first);
    let taken = (0u64..).zip(placed).take_while(|(i, tensor)| tensor.at == first + i * step).count();
    Some((first, step, taken))
}
