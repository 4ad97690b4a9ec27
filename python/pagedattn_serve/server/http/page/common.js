// What every part of the page uses.

export const $ = (id) => document.getElementById(id);
export const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
