// Sentences to start from, written for this project; every person in them is invented.
export const SAMPLES = {
  easy: [
    "Our flight was cancelled because of the snow.",
    "She bought a new bicycle for her birthday.",
  ],
  personal: [
    "John takes insulin twice a day for his diabetes.",
    "My password for the bank is sunflower.",
  ],
  hard: [
    "Seventeen grey herons slept in the lighthouse.",
    "Torque valve B to 32 Nm, then fit the gasket.",
  ],
};
