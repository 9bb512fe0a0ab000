//! On a machine with many GPUs and devices, limits the display to the closest GPUs of each device.

use crate::diagnosis::Diagnosis;
use crate::facts::Facts;

/// Up to this many pairs, all are shown.
const SHOW_ALL_UP_TO: usize = 8;

/// Pairs of a GPU and a device that has a closer GPU, by their addresses.
pub(crate) fn distant(facts: &Facts) -> Vec<(String, String)> {
    let class = |gpu, device| Some(facts.tree.path(device, gpu)?.class);
    let mut far = Vec::new();
    for device in facts.peers() {
        let gpus = || facts.gpus.iter().map(|gpu| gpu.address);
        let Some(closest) = gpus().filter_map(|gpu| class(gpu, device)).min() else { continue };
        let further = gpus().filter(|gpu| class(*gpu, device).is_some_and(|class| class > closest));
        far.extend(further.map(|gpu| (gpu.to_string(), device.to_string())));
    }
    far
}

/// A diagnosis without its distant pairs, and how many were removed: none if there are few pairs in all.
pub(crate) fn nearest(diagnosis: &Diagnosis) -> (Diagnosis, usize) {
    let pairs = diagnosis.routes.chunk_by(|a, b| (&a.gpu, &a.device) == (&b.gpu, &b.device));
    let pairs: Vec<_> = pairs.map(|rows| (rows[0].gpu.clone(), rows[0].device.clone())).collect();
    let mut shown = diagnosis.clone();
    if pairs.len() <= SHOW_ALL_UP_TO {
        return (shown, 0);
    }
    let is_far = |gpu: &str, device: &str| {
        diagnosis.distant.iter().any(|(far_gpu, far_device)| far_gpu == gpu && far_device == device)
    };
    let hidden_paths: Vec<String> =
        diagnosis.distant.iter().map(|(gpu, device)| format!("{device} to {gpu}")).collect();
    shown.routes.retain(|row| !is_far(&row.gpu, &row.device));
    shown.advice.retain(|advice| !is_far(&advice.gpu, &advice.device));
    shown.checks.retain(|check| check.about.as_ref().is_none_or(|about| !hidden_paths.contains(about)));
    let hidden = pairs.iter().filter(|(gpu, device)| is_far(gpu, device)).count();
    (shown, hidden)
}
