//! A secret of its own is planted in every place that takes one, and looked for wherever anything is printed, shown or
//! sent that is not for its owner: as it is, and in every form that code turns text into.

mod config_errors;
mod debug_output;
mod run;
mod scene;
mod secret_search;
