//! Makes tensors from plans.

use std::sync::Arc;

use onehop_gpu::Region;
use onehop_load::plan::Placed;
use onehop_load::{Part, Plan, TensorInfo};

use super::PartView;
use crate::device::GpuDevice;
use crate::dlpack;
use crate::dtype::{data_type, exported};
use crate::error::{Error, Result};
use crate::pool::Lease;
use crate::tensor::{Tensor, packed_strides};

pub(super) fn fits(plan: &Plan, device: &GpuDevice) -> Result<()> {
    match plan.fit_on(&*device.gpu)?.filter(|fit| !fit.fits) {
        Some(fit) => Err(Error::Fit {
            needed: fit.peak_gpu_bytes,
            free: fit.free_gpu_bytes,
            missing: fit.missing_bytes,
        }),
        None => Ok(()),
    }
}

/// Bytes of the arena.
pub(super) fn memory(arena: &Region, at: u64, bytes: u64) -> Result<Region> {
    Ok(arena.slice(at as usize..(at + bytes) as usize)?)
}

pub(super) fn whole(
    placed: &Placed,
    memory: Region,
    lease: Option<Arc<Lease>>,
    device: dlpack::DlDevice,
) -> Tensor {
    let Placed { name, dtype, shape, bytes, .. } = placed;
    let info =
        TensorInfo { name: name.clone(), dtype: *dtype, shape: shape.clone(), offset: 0, bytes: *bytes };
    let carrier_shape: Vec<i64> = exported(&info).shape.iter().map(|n| *n as i64).collect();
    Tensor {
        strides: packed_strides(&carrier_shape),
        shape: carrier_shape,
        carrier: data_type(*dtype),
        memory,
        lease,
        name: info.name,
        dtype: *dtype,
        logical: info.shape,
        device,
    }
}

impl PartView {
    /// The tensor of these elements, for a part at `at`.
    pub(crate) fn tensor(
        &self,
        info: &TensorInfo,
        part: &Part,
        arena: &Region,
        at: u64,
        device: dlpack::DlDevice,
    ) -> Result<Tensor> {
        let carrier = data_type(info.dtype);
        let part_shape: Vec<i64> = part.shape.iter().map(|n| *n as i64).collect();
        let (mut shape, mut strides, mut first, mut last) = (Vec::new(), Vec::new(), 0, 0);
        for ((dim, size), stride) in self.dims.iter().zip(&part.shape).zip(packed_strides(&part_shape)) {
            let stride = stride as u64;
            // If a part exceeds the request in a dimension, it has all of it.
            let start = if *size == dim.end() - dim.first { 0 } else { dim.first };
            first += start * stride;
            last += (start + dim.count.saturating_sub(1) * dim.step) * stride;
            if !dim.single {
                shape.push(dim.count as i64);
                strides.push((stride * dim.step) as i64);
            }
        }
        let is_whole = shape.iter().map(|n| *n as u64).eq(exported(info).shape);
        let width = u64::from(carrier.bits / 8);
        let elements = if self.dims.iter().any(|dim| dim.count == 0) { 0 } else { last + 1 - first };
        let first = if elements == 0 { 0 } else { first };
        Ok(Tensor {
            name: info.name.clone(),
            dtype: info.dtype,
            carrier,
            logical: if is_whole { info.shape.clone() } else { shape.iter().map(|n| *n as u64).collect() },
            memory: memory(arena, at + first * width, elements * width)?,
            lease: None,
            shape,
            strides,
            device,
        })
    }
}
