//! Opens a part of a drive as an array, by the best route that works.

use std::ops::Range;
use std::sync::Arc;

use onehop_array::{Array, ArrayOptions};
use onehop_drive::{Drive, Namespace, Placement};
use onehop_gpu::Gpu;

use crate::engine::{no_route, why_not};
use crate::error::Result;
use crate::route::{BetterRoute, MOVE_LESS, RouteRequest};

/// An open array, and its route.
pub struct RoutedArray {
    /// The array.
    pub array: Array,
    /// Where its queue and pages are.
    pub placement: Placement,
    /// The route's name.
    pub route: &'static str,
    /// Better routes that were tried, and why they failed.
    pub why_not_better: Vec<BetterRoute>,
}

/// Opens blocks of a drive as an array by the requested route, or the best that works. The route sets the placement.
///
/// # Errors
/// When the CPU commands the drive on the requested route, the sizes are invalid, no route works, or the drive fails.
pub fn open_array(
    (drive, ns, blocks): (&Drive, &Namespace, Range<u64>),
    gpu: &Arc<dyn Gpu>,
    request: &RouteRequest,
    options: &ArrayOptions,
) -> Result<RoutedArray> {
    let mut tried = Vec::new();
    for (route, placement) in request.by_gpu()? {
        let options = ArrayOptions { placement, ..options.clone() };
        match Array::open(drive, gpu.clone(), ns, blocks.clone(), options) {
            Ok(array) => {
                return Ok(RoutedArray { array, placement, route: route.name(), why_not_better: tried });
            }
            Err(error) => {
                let mut no = why_not(route, error.into())?;
                no.fix = match no.fix.as_str() {
                    MOVE_LESS => "Use a smaller cache".into(),
                    // Arrays have no such routes.
                    fix if fix.contains("cpu/") => String::new(),
                    fix if fix.contains("--queues") => "An array and its reader take a queue each".into(),
                    _ => no.fix,
                };
                // Two placements of one route may fail for the same reason.
                if !tried.contains(&no) {
                    tried.push(no);
                }
            }
        }
    }
    Err(no_route(request, tried))
}
